"""Which configuration to measure next, and what to learn from the outcome."""
