"""Quality on running servers and in the reference engine: who is asked, and what comes of it."""
