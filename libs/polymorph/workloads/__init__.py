"""Workloads: real inputs of an operation, asked of a worker and kept for who measures on them."""
