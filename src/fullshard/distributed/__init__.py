"""Agreement of ranks on errors, local parts of DTensors, and loopback sockets."""
