"""One model traced once on fake tensors: its kernels, activations and units, as a ModelSpec."""
