"""Deadlines of requests that may never be answered."""

ANSWER_SECONDS = 60.0
"""Deadline of a request to an object store, with all its tries."""
