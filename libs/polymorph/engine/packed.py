"""Weights in the layouts that kernels asked for: those of the table in force, and some of before it for a way back."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

from polymorph.engine.bindings import BindingRefused

PackedKey = tuple[int, str]
"""The key of a kept weight, and a layout."""
KEPT = 2
"""Packings of one weight that stay though the table in force uses them no more: going back to one costs no packing."""


class PackedWeights:
    """Held within a budget of bytes, which what is in force takes first: what it leaves holds what was used last."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._held: OrderedDict[PackedKey, Any] = OrderedDict()
        self._in_force: frozenset[PackedKey] = frozenset()
        self._fresh: set[PackedKey] = set()
        self.bytes = 0

    def __contains__(self, key: PackedKey) -> bool:
        return key in self._held

    def __getitem__(self, key: PackedKey) -> Any:
        return self._held[key]

    def add(self, key: PackedKey, tensor: Any, needed: Collection[PackedKey]) -> None:
        """Holds what was packed for a table that is being made, and that needs `needed`; old ones give way to it.

        Raises:
            BindingRefused: the budget is less than the table in force and this one take.
        """
        while self.bytes + _bytes(tensor) > self.budget_bytes:
            old = (each for each in self._held if each not in self._in_force and each not in needed)
            oldest = next(old, None)
            if oldest is None:
                raise BindingRefused(
                    f"packed weights would take more than the budget of {self.budget_bytes >> 20} MiB"
                )
            self._drop(oldest)
        self._held[key] = tensor
        self.bytes += _bytes(tensor)
        self._fresh.add(key)

    def put_in_force(self, used: Iterable[PackedKey], *, keep_all: bool = False) -> None:
        """A table that uses these is in force now. `keep_all` drops nothing, for a switch back."""
        self._in_force = frozenset(used)
        self._fresh.clear()
        for key in [each for each in self._held if each in self._in_force]:
            self._held.move_to_end(key)
        if not keep_all:
            self._drop_beyond(KEPT)

    def abandon(self) -> None:
        """The table that was being made will not be: what was packed for it goes."""
        for key in self._fresh & self._held.keys():
            self._drop(key)
        self._fresh.clear()

    def clear(self) -> None:
        """Nothing is in force, and nothing is held."""
        self._in_force = frozenset()
        self._fresh.clear()
        self._held.clear()
        self.bytes = 0

    def _drop_beyond(self, most: int) -> None:
        seen: dict[int, int] = {}
        for key in [each for each in reversed(self._held) if each not in self._in_force]:
            seen[key[0]] = seen.get(key[0], 0) + 1
            if seen[key[0]] > most:
                self._drop(key)

    def _drop(self, key: PackedKey) -> None:
        self.bytes -= _bytes(self._held.pop(key))


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
