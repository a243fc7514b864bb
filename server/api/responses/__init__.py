"""The endpoint /v1/responses."""
