"""Records of a run: events, measurements, findings, and the files that hold them."""
