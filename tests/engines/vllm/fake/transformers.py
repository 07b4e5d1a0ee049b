"""Stand-in: nothing to import."""
