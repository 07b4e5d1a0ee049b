"""What is reported about a run: one metric or family of metrics a file, found by name."""
