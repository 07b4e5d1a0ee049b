"""The quality suites, one a file."""
