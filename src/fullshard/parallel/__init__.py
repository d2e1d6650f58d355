"""Applies a Plan to the user's nn.Module, in place, on DTensors; tensor, context and expert parallelism."""
