"""Slot tables for the two arms of an end-to-end replay."""

from typing import Any

from polymorph.events.types import EvaluateCandidate
from polymorph.kernels.buckets import UPPER_BOUNDS, lower_bound

Entry = dict[str, Any]


def entry(definition: str, min_m: int, max_m: int, path: str, artifact: str, layout: str | None) -> Entry:
    """One binding as the engine takes it."""
    return {
        "definition": definition, "min_m": min_m, "max_m": max_m, "path": path, "artifact": artifact,
        "layout": layout,
    }  # fmt: skip


def with_candidate(incumbents: list[Entry], candidate: Entry) -> list[Entry]:
    """The incumbents' table with the candidate in its range; what an incumbent serves outside it stays."""
    table: list[Entry] = []
    for binding in incumbents:
        if binding["definition"] != candidate["definition"]:
            table.append(binding)
            continue
        for low, high in _outside(binding, candidate["min_m"], candidate["max_m"]):
            table.append({**binding, "min_m": low, "max_m": high})
    return [*table, candidate]


def widened(order: EvaluateCandidate, max_m: int) -> tuple[int, int]:
    """The whole buckets that lie within the order's range: an engine binds no part of a bucket.

    Raises:
        ValueError: none does.
    """
    inside = [
        upper
        for upper in UPPER_BOUNDS
        if lower_bound(upper) >= order.min_m and upper <= min(order.max_m, max_m)
    ]
    if not inside:
        raise ValueError(f"no bucket of M lies whole between {order.min_m} and {min(order.max_m, max_m)}")
    return lower_bound(inside[0]), inside[-1]


def _outside(binding: Entry, low: int, high: int) -> list[tuple[int, int]]:
    parts = [
        (binding["min_m"], min(binding["max_m"], low - 1)),
        (max(binding["min_m"], high + 1), binding["max_m"]),
    ]
    return [(first, last) for first, last in parts if first <= last]
