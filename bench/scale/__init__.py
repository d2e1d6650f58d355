"""Measures what grows with the number of ranks, on fake ranks."""
