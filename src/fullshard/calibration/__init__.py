"""Rates of this machine, measured: matmuls, memory, updates, collectives and drives."""
