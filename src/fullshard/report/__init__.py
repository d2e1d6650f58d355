"""Values -> what a person reads. Nothing in this room imports torch."""
