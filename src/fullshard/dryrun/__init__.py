"""A dry run: the real sharded step on fake tensors, among ranks that are nowhere. It counts every byte."""
