"""The `kvtune` command: one file a command, each parsing, calling and printing."""
