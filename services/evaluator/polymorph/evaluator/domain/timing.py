"""The order of timed batches: random, and drawn where the candidate cannot know it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Pair:
    """Two batches on equal inputs; `candidate_first` says which goes first."""

    load: int
    candidate_first: bool
    start: int


def schedule(loads: int, pairs: int, copies: int, rng: np.random.Generator) -> Iterator[Pair]:
    """Every load gets its pairs, all shuffled, each beginning at another copy of the weights."""
    order = rng.permutation(np.repeat(np.arange(loads), pairs))
    for load in order:
        yield Pair(int(load), bool(rng.integers(2)), int(rng.integers(copies)))


def copies_needed(weight_bytes: float, cache_bytes: int, *, most: int = 64) -> int:
    """How many copies of a weight defeat the last cache, as a model's other layers do between two calls."""
    return int(np.clip(np.ceil(4 * cache_bytes / weight_bytes), 1, most))


def calls_in_batch(call_s: float, copies: int, *, batch_s: float = 0.006) -> int:
    """Enough calls that one answer's way to the evaluator does not matter, and no more copies than there are."""
    return int(np.clip(np.ceil(batch_s / max(call_s, 1e-7)), 1, copies))
