"""The search for the fastest plan that fits, and why it was chosen, without torch."""
