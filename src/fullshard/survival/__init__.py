"""Faults found while a run trains: hung ranks, loss spikes, replicas and ranks that differ."""
