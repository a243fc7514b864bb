"""The engine core: token ids in, token ids out, in a process of its own. Never imports `ringserve.server`."""
