"""Agreement of ranks, local parts of DTensors, parts of sequences, collectives for gloo, and loopback."""
