"""Serving configs as files: one format a module, found by `emitters()`."""
