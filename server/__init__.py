"""The front end: HTTP in, text out. Never imports `engine`, torch or transformers."""
