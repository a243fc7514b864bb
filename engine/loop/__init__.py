"""The engine process between its rings: records in, steps, records out."""
