"""Files of the operating system: durable writes, direct I/O, and what a command may overwrite; no torch."""
