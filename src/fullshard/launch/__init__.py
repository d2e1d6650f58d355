"""Launching: ranks on this machine through torchelastic, or ranks that torchrun or SLURM started."""
