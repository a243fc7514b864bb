"""Token ids to text and back, and text as JSON strings."""
