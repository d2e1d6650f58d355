"""Settings of other tools, read into a Run: what is said of each key, and the run.toml that comes out."""
