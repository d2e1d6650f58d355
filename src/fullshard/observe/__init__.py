"""Observation of a run: its log, progress, live status, trackers, profiles, memory, and slow ranks."""
