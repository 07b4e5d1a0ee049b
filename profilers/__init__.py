"""What is true about a workload and a server: traces, load, metrics, statistics and verdict."""
