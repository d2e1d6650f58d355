"""Human-readable output of values. Nothing in this package imports torch."""
