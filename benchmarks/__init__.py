"""Each module answers one question against a named alternative, measured in one run."""
