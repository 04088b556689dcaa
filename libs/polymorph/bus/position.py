"""Where a watcher stands in the event stream: `<epoch>-<sequence>`.

The epoch is when the stream was made, in milliseconds: a stream made anew counts from 1 again, under another epoch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """The last event a watcher has seen."""

    epoch: int
    sequence: int

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Reads `<epoch>-<sequence>`.

        Raises:
            ValueError: other text.
        """
        epoch, dash, sequence = text.partition("-")
        if not (dash and epoch.isascii() and epoch.isdigit() and sequence.isascii() and sequence.isdigit()):
            raise ValueError(
                f"{text!r} is no position: <epoch>-<sequence>, for example 1760000000000-42, or 0-0"
            )
        return cls(int(epoch), int(sequence))

    def __str__(self) -> str:
        return f"{self.epoch}-{self.sequence}"


@dataclass(frozen=True, slots=True)
class Extent:
    """What a stream holds now: sequences `first` to `last`; an empty stream has `first` = `last` + 1."""

    epoch: int
    first: int
    last: int

    def resume(self, after: Position) -> tuple[Position, bool]:
        """Where to go on after `after`, and whether events in between are gone."""
        if after == START:
            return Position(self.epoch, self.first - 1), False
        if after.epoch != self.epoch or after.sequence < self.first - 1:
            return Position(self.epoch, self.first - 1), True
        if after.sequence > self.last:
            return Position(self.epoch, self.last), True
        return after, False


START = Position(0, 0)
