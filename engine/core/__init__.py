"""The engine on torch: one step at a time, or two in flight."""
