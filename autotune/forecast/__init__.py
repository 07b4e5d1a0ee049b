"""What a lever would buy, told before a trial is spent on it, and how well that was told."""
