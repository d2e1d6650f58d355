"""Dry run: runs the real sharded step on fake tensors with a fake process group, and counts every byte."""
