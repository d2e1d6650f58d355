"""Conversion of other tools' settings into a Run: a verdict on each key, and the resulting run.toml."""
