"""Ranks and tensors over ranks: agreement on errors, parts of DTensors, loopback."""
