"""Takes over checkpoints of other trainers: reads weights, moments and progress, and writes a checkpoint."""
