"""What the engine is asked to run: checked before any of it is loaded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from polymorph.kernels.buckets import UPPER_BOUNDS, lower_bound

ANY = (1 << 63) - 1


class BindingRefused(ValueError):
    """A set of bindings that this engine cannot run; the old table stays."""


@dataclass(frozen=True)
class SlotBinding:
    """Use the library at `path` for `definition` where min_m <= M <= max_m, and where the definition's feature, if it has
    one, lies from `least` to `most`. `layout` names the weights' packing.
    """

    definition: str
    min_m: int
    max_m: int
    path: str
    artifact: str
    layout: str | None = None
    least: int = 0
    most: int = ANY

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        return cls(**document)

    def buckets(self) -> tuple[int, ...]:
        """Indices of the buckets it serves.

        Raises:
            BindingRefused: it covers a bucket partly: what was measured for a bucket serves all of it or nothing.
        """
        last = len(UPPER_BOUNDS) - 1
        top = min(UPPER_BOUNDS[last], self.max_m)
        if top not in UPPER_BOUNDS or self.min_m not in {lower_bound(upper) for upper in UPPER_BOUNDS}:
            raise BindingRefused(
                f"{self.definition}: M from {self.min_m} to {self.max_m} cuts a bucket: "
                f"buckets end at {', '.join(map(str, UPPER_BOUNDS))}"
            )
        found = tuple(i for i, upper in enumerate(UPPER_BOUNDS) if self.min_m <= upper <= top)
        if not found:
            raise BindingRefused(f"{self.definition}: no M lies between {self.min_m} and {self.max_m}")
        return found


def checked(documents: Iterable[Mapping[str, Any]], known: Iterable[str]) -> list[SlotBinding]:
    """The bindings, where every definition has a slot and no two of them claim one bucket.

    Raises:
        BindingRefused: otherwise.
    """
    slots = set(known)
    taken: dict[tuple[str, int], list[SlotBinding]] = {}
    bindings = [SlotBinding.of(document) for document in documents]
    for binding in bindings:
        if binding.definition not in slots:
            raise BindingRefused(
                f"no slot for {binding.definition}: this engine has {', '.join(sorted(slots))}"
            )
        if not 0 <= binding.least <= binding.most:
            raise BindingRefused(f"{binding.definition}: no call has {binding.least} to {binding.most}")
        for index in binding.buckets():
            claims = taken.setdefault((binding.definition, index), [])
            for other in claims:
                _raise_for_two(other, binding, index)
            claims.append(binding)
    return bindings


def _raise_for_two(one: SlotBinding, two: SlotBinding, index: int) -> None:
    if one.most < two.least or two.most < one.least:
        return
    raise BindingRefused(
        f"{one.definition}: both {one.artifact[:12]} and {two.artifact[:12]} claim M up to {UPPER_BOUNDS[index]}"
    )
