"""How it is computed: device probes and, later, one compute kernel a file."""
