"""What a chat model reads and writes: templates, tools, reasoning."""
