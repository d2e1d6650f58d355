"""Measurement of memory, of the speed of matmuls, and of what this machine is."""
