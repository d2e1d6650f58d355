"""Checks before a run: whether the settings, the machine, the model, the data and the ranks are right."""
