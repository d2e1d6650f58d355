"""Measurement of this machine: matmuls, memory, links and drive."""
