"""Outputs as OpenAI's JSON and server-sent events."""
