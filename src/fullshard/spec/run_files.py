"""Names of the files and directories that a run writes into its directory."""

CHECKPOINTS, LAUNCH, PLAN = "checkpoints", "launch.json", "plan.json"
METRICS, EVENTS, MEASUREMENT = "metrics.jsonl", "events.jsonl", "measurement.json"
EXPORT = "model.safetensors"
TRACKERS = "trackers.json"
"""The identifier of each tracker's record of the run."""
