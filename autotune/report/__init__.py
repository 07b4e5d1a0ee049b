"""Pages to read in a browser: what a run found, in one file that needs no network."""
