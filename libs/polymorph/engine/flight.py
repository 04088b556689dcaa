"""The flight record: which kernel call a rank of the engine is in, in a small file mapped into memory.

The dispatcher writes it around each call of a kernel, so that after a death there is a witness, and a call that does
not end can be seen from outside. `$POLYMORPH_FLIGHT_DIR/rank-<rank>.flight`, 128 bytes, little endian; ranks count on over
data-parallel engines:

    0   int64  CLOCK_MONOTONIC nanoseconds when the call in flight began; 0 when none is in flight
    8   int64  epoch of the table that the call came from
    16  char[64] digest of the artifact, ASCII, zero padded
    80  int64  calls that began, those that pack a weight too
    88  reserved, zero
"""

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

FLIGHT_VARIABLE = "POLYMORPH_FLIGHT_DIR"
SIZE = 128
_RECORD = struct.Struct("<qq64sq")
_BEGAN = struct.Struct("<q")
_NAME = re.compile(r"rank-(\d+)\.flight")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Flight:
    """A kernel call that began and has not ended. `began_ns` is of CLOCK_MONOTONIC; `calls` counts it too."""

    rank: int
    artifact: str
    began_ns: int
    epoch: int
    calls: int

    def seconds(self, now_ns: int) -> float:
        return max(0, now_ns - self.began_ns) / 1e9


def rank_of_all(worker: Any) -> int:
    """The rank of one of vLLM's workers, counted on over data-parallel engines, which may share the folder."""
    parallel = getattr(worker, "parallel_config", None)
    engine = int(getattr(parallel, "data_parallel_index", 0))
    return engine * int(getattr(parallel, "world_size", 1)) + int(getattr(worker, "rank", 0))


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.flight"


def in_flight(folder: Path) -> tuple[Flight, ...]:
    """The calls in flight, by rank. What is not written fully, or by nobody, is no call."""
    found = []
    for path in sorted(folder.glob("rank-*.flight")):
        name = _NAME.fullmatch(path.name)
        flight = _read(path, int(name[1])) if name else None
        if flight is not None:
            found.append(flight)
    return tuple(found)


def _read(path: Path, rank: int) -> Flight | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < _RECORD.size:
        return None
    began, epoch, digest, calls = _RECORD.unpack_from(content)
    artifact = digest.rstrip(b"\0").decode("ascii", "replace")
    # A call that ends while we read has begun again or is 0: either is true of some moment.
    if began <= 0 or _DIGEST.fullmatch(artifact) is None:
        return None
    return Flight(rank, artifact, began, epoch, calls)


class FlightRecord:
    """Writes the record of one rank, for tools without the dispatcher. The time is written last and cleared first."""

    def __init__(self, folder: Path, rank: int) -> None:
        with path_of(folder, rank).open("w+b") as file:
            file.truncate(SIZE)
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self._calls = 0

    def begin(self, artifact: str, epoch: int, now_ns: int) -> None:
        """Raises `ValueError` for what is no sha256 in hexadecimal."""
        if _DIGEST.fullmatch(artifact) is None:
            raise ValueError(f"{artifact!r} is no digest: 64 of 0-9 and a-f")
        self._calls += 1
        _RECORD.pack_into(self._memory, 0, 0, epoch, artifact.encode(), self._calls)
        _BEGAN.pack_into(self._memory, 0, now_ns)

    def end(self) -> None:
        _BEGAN.pack_into(self._memory, 0, 0)

    def close(self) -> None:
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
