"""Ranks on this machine through torchelastic, or those that torchrun and SLURM have started."""
