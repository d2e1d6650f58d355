"""The jobs that ranks run (training, calibration), and a run's directory, log, metrics and checkpoints."""
