"""Requests in, outputs out, over the rings; knows no HTTP."""
