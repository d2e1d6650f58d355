"""Applies a Plan to the user's own nn.Module, in place, on DTensors."""
