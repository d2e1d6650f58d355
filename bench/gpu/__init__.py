"""Measures on GPUs what the planner predicts: `python -m bench.gpu`, see README.md beside this file."""
