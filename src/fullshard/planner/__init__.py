"""Predictions from a ModelSpec and a Plan, computed from shapes alone. This package does not import torch."""
