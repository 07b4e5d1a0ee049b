"""Attention that is built into checkpoints, run with caches whose bytes are counted.

Multi-query and grouped-query models need nothing of their own: the reference engine runs them.
"""
