"""Buckets of M, the number of tokens that one call computes: kernels are chosen and measured by bucket."""

import bisect

UPPER_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def bucket(m: int) -> int:
    """The upper bound of the bucket that holds `m` tokens.

    Raises:
        ValueError: `m` is below 1.
    """
    if m < 1:
        raise ValueError(f"M is {m}: a call computes at least 1 token")
    index = bisect.bisect_left(UPPER_BOUNDS, m)
    return UPPER_BOUNDS[min(index, len(UPPER_BOUNDS) - 1)]


def lower_bound(upper: int) -> int:
    """The smallest M of the bucket that `upper` closes."""
    index = UPPER_BOUNDS.index(upper)
    return UPPER_BOUNDS[index - 1] + 1 if index else 1
