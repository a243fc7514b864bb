"""Attention of a packed batch over the paged KV cache."""
