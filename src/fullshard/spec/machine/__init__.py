"""Hardware: chips, links, their rates, and where each figure comes from."""
