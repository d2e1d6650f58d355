"""The values that packages exchange. Nothing in this package imports torch."""
