"""Files and the terminal: durable writes, direct I/O, checks before a command overwrites files. No torch."""
