"""What the engine is asked to run: checked before any of it is loaded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from polymorph.kernels.buckets import UPPER_BOUNDS, lower_bound


class BindingRefused(ValueError):
    """A set of bindings that this engine cannot run; the old table stays."""


@dataclass(frozen=True)
class SlotBinding:
    """Use the library at `path` for `definition` where min_m <= M <= max_m. `layout` names the weight's packing."""

    definition: str
    min_m: int
    max_m: int
    path: str
    artifact: str
    layout: str | None = None

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
    taken: dict[tuple[str, int], str] = {}
    bindings = [SlotBinding.of(document) for document in documents]
    for binding in bindings:
        if binding.definition not in slots:
            raise BindingRefused(
                f"no slot for {binding.definition}: this engine has {', '.join(sorted(slots))}"
            )
        for index in binding.buckets():
            other = taken.setdefault((binding.definition, index), binding.artifact)
            if other != binding.artifact:
                raise BindingRefused(
                    f"{binding.definition}: both {other[:12]} and {binding.artifact[:12]} claim M up to "
                    f"{UPPER_BOUNDS[index]}"
                )
    return bindings
