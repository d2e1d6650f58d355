"""The values that the stages hand to each other. Nothing in this room imports torch."""
