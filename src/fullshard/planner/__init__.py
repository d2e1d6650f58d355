"""ModelSpec and Plan -> predictions, from shapes alone. Nothing in this room imports torch."""
