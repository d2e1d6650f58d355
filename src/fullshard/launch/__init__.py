"""Launching: ranks on this machine, or ranks that torchrun or SLURM started."""
