"""Names of the files and directories that a run writes into its directory."""

CHECKPOINTS, LAUNCH, PLAN = "checkpoints", "launch.json", "plan.json"
METRICS, EVENTS, MEASUREMENT = "metrics.jsonl", "events.jsonl", "measurement.json"
PROFILES = "profiles"
OUT_OF_MEMORY = "out-of-memory"
"""Reports of ranks that ran out of memory."""
TRACKERS = "trackers.json"
"""The identifier of each tracker's record of the run."""
