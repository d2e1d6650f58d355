"""Human-readable output of plans, measurements and calibrations. This package does not import torch."""
