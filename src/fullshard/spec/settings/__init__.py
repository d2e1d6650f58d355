"""The sections of a run file, and the checks between them."""
