"""Texts and tokens of any kind as batches: readers, tokenizers, packing, sampling, prefetch."""
