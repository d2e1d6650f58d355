"""What ranks run: training, calibration; the run's directory, log, metrics and checkpoints."""
