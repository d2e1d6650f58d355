"""Files, object stores and the terminal: durable writes, checks before files are overwritten. No torch."""
