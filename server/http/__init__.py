"""Connections, bodies and layers; knows no generation."""
