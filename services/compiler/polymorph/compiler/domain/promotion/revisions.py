"""Revisions: complete sets of kernels, named after their content."""

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable

from polymorph.events.state import EMPTY
from polymorph.events.values import KernelBinding, Revision


def compose(parent: Revision, bindings: Iterable[KernelBinding], *, regime: str | None = None) -> Revision:
    """`parent` with `bindings` put over it: where ranges of M overlap, the new binding holds.

    Raises:
        ValueError: a range that ends before it begins, or two new bindings that overlap.
    """
    new = tuple(bindings)
    _check(new)
    kept = parent.kernels
    for binding in new:
        kept = tuple(piece for old in kept for piece in _outside(old, binding))
    return _revision(parent, (*kept, *new), regime or parent.regime)


def without(revision: Revision, artifacts: Collection[str]) -> Revision:
    """`revision` without the kernels of `artifacts`; itself where it has none of them."""
    kept = tuple(kernel for kernel in revision.kernels if kernel.artifact not in artifacts)
    return revision if kept == revision.kernels else _revision(revision, kept, revision.regime)


def artifacts(revision: Revision | None) -> frozenset[str]:
    return frozenset(kernel.artifact for kernel in revision.kernels) if revision else frozenset()


def _revision(parent: Revision, kernels: tuple[KernelBinding, ...], regime: str) -> Revision:
    """Settings of the engine and the set of slots stay as the parent has them."""
    held = {name: value for name in ("engine", "slots") if (value := getattr(parent, name)) is not None}
    if not kernels and not held:
        return EMPTY
    ordered = tuple(sorted(kernels, key=lambda kernel: (kernel.definition, kernel.min_m)))
    body: list[object] = [regime, [kernel.model_dump(mode="json") for kernel in ordered]]
    if held:
        body.append(parent.model_dump(mode="json", include=set(held)))
    name = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]
    return Revision(revision=f"r-{name}", parent=parent.revision, kernels=ordered, regime=regime, **held)


def _outside(old: KernelBinding, new: KernelBinding) -> tuple[KernelBinding, ...]:
    """What is left of `old` beside `new`."""
    if old.definition != new.definition or old.max_m < new.min_m or old.min_m > new.max_m:
        return (old,)
    below = old.model_copy(update={"max_m": new.min_m - 1})
    above = old.model_copy(update={"min_m": new.max_m + 1})
    return tuple(piece for piece in (below, above) if piece.min_m <= piece.max_m)


def _check(bindings: tuple[KernelBinding, ...]) -> None:
    ordered = sorted(bindings, key=lambda binding: (binding.definition, binding.min_m))
    for binding in ordered:
        if binding.min_m > binding.max_m:
            raise ValueError(f"{binding.definition}: M from {binding.min_m} to {binding.max_m} is no range")
    for left, right in itertools.pairwise(ordered):
        if left.definition == right.definition and right.min_m <= left.max_m:
            raise ValueError(
                f"{left.definition}: M to {left.max_m} and from {right.min_m} overlap: bind each M once"
            )
