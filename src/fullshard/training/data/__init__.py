"""Training data: text as bytes, whose order is a function of the seed and the step, and of nothing else."""

from fullshard.training.data.batches import Batches
from fullshard.training.data.text import IGNORED_LABEL, TextData, build_data

__all__ = ["IGNORED_LABEL", "Batches", "TextData", "build_data"]
