"""Numbers of tokens to try a kernel with, and to make an engine compute."""

SELF_PREFIX = "polymorph-self-"
"""Ids of requests of our own begin with it."""
_MOST_ROWS = 256


def sample_rows(min_m: int, max_m: int) -> tuple[int, ...]:
    """Both ends of the range and its ragged middle, no more than is quick."""
    top = max(min_m, min(max_m, _MOST_ROWS))
    return tuple(sorted({min_m, (min_m + top) // 2, max(min_m, top - 1), top}))


def exercise_sizes(min_m: int, max_m: int) -> tuple[int, ...]:
    """Sizes of steps in the order to try: steps of ours may meet other requests in the batch and grow."""
    top = max(min_m, min(max_m, _MOST_ROWS))
    return tuple(dict.fromkeys((top, min_m, (min_m + top) // 2)))
