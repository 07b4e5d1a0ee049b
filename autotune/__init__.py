"""Which policy stack, and how sure are we: search, decision, hand-over and the command line."""
