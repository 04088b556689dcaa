"""Paired and hierarchical tests: one statistical contract from micro-benchmark to end to end."""
