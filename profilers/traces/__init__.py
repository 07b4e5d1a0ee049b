"""Trace formats, one file each: a subclass of `TraceFormat` here is found by its `name`."""
