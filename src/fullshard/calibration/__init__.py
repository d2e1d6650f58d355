"""Rates of this machine, measured: matmuls, memory, collectives, drives, and a step's overhead."""
