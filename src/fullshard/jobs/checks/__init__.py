"""Checks of a run before it starts: of settings, data, model, machine and ranks."""
