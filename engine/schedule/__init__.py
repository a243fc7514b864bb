"""Which requests run, and on which tokens and blocks, in the next step."""
