"""`ringserve bench URL`: load for any OpenAI-compatible server, and what its users would see. Knows no engine."""
