"""Observation of a run: its log, progress, trackers, profiles, memory, and slow ranks."""
