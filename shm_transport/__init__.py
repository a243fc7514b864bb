"""Moves fixed-layout records between two processes of one machine; knows no model, no text and no HTTP."""
