"""What a run really took: time, and memory."""
