"""Measurement of real runs: time and memory."""
