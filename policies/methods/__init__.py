"""KV-cache methods: one file a system of the field."""
