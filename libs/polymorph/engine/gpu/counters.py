"""Which kernel served how many calls, also inside captured graphs: the proof that what was engaged has run."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

CAPACITY = 4096


@dataclass(frozen=True)
class Cell:
    """What is counted: calls of one definition in one bucket of M, by one artifact."""

    definition: str
    bucket: int
    artifact: str


class CountersFull(RuntimeError):
    """More kernels were engaged in this process than there are cells."""


class Counters:
    """Cells in the device's memory for what graphs replay, and numbers on the host for eager calls.

    A graph of ours moves its cells with one small kernel at its end, by the calls that were captured in it. In a graph
    that somebody else captures, each call of an engaged kernel captures its own increment beside it.
    """

    def __init__(self, device: Any, capturing: Callable[[], bool] = lambda: False) -> None:
        self._in_graphs = torch.zeros(CAPACITY, dtype=torch.int64, device=device)
        self._elsewhere = torch.zeros_like(self._in_graphs)
        self._eager: Counter[int] = Counter()
        self._cells: dict[Cell, int] = {}
        self._capturing = capturing
        self._tallies = threading.local()

    def index(self, cell: Cell) -> int:
        """The number of a cell; cells are never given to another.

        Raises:
            CountersFull: there is none left.
        """
        if cell not in self._cells and len(self._cells) == CAPACITY:
            raise CountersFull(f"{CAPACITY} kernels were counted in this process: restart the engine")
        return self._cells.setdefault(cell, len(self._cells))

    def served(self, index: int) -> None:
        """One call was launched, or captured, in this thread."""
        tally = getattr(self._tallies, "current", None)
        if tally is not None:
            tally[index] += 1
        elif self._capturing():
            self._in_graphs[index].add_(1)
        else:
            self._eager[index] += 1

    @contextmanager
    def tallying(self) -> Iterator[Counter[int]]:
        """Calls of this thread are told to the tally, and not counted."""
        tally: Counter[int] = Counter()
        self._tallies.current = tally
        try:
            yield tally
        finally:
            self._tallies.current = None

    def increments(self, tally: Counter[int]) -> Any:
        """The tally in the device's memory. Not while a graph is captured: it copies from the host."""
        steps = torch.zeros(CAPACITY, dtype=torch.int64)
        for index, calls in tally.items():
            steps[index] = calls
        return steps.to(self._in_graphs.device)

    def warm(self) -> None:
        """Has the code of `add` loaded, on other memory: a graph may be moving the cells at this moment."""
        self._elsewhere.add_(self._elsewhere)

    def add(self, increments: Any) -> None:
        """Moves all cells on the device by `increments`, on the current stream; may be captured."""
        self._in_graphs.add_(increments)

    def read(self) -> dict[Cell, int]:
        """Calls by cell since the start. Waits for the current stream; not while a graph is captured."""
        replayed = self._in_graphs.tolist()
        return {cell: replayed[index] + self._eager[index] for cell, index in self._cells.items()}
