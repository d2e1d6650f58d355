"""Detection of faults during training: hung ranks, loss spikes, and replicas or ranks that differ."""
