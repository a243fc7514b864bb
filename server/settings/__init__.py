"""Flags, environment, configuration files, and where the model lies."""
