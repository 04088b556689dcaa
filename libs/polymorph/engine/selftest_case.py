"""What a self-test is asked and what it answers; needs no torch, so that whoever asks need not load it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

MOST_BYTES = 64 << 10
"""Neither a question nor an answer is longer."""


@dataclass(frozen=True)
class SelfTest:
    """`calls` and `weight` are safetensors files; `rows` are the numbers of tokens to try, to which captured rows are
    repeated or cut. `library` is a descriptor of the kernel, `host` the library that it is called through, `scratch` the
    one folder that may be written; `level` is the isolation, of which the process locks its own doors.
    """

    definition: str
    numerics: str
    calls: tuple[str, ...]
    weight: str | None
    rows: tuple[int, ...]
    library: int
    host: str
    scratch: str
    level: int

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        return cls(**{**document, "calls": tuple(document["calls"]), "rows": tuple(document["rows"])})

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SelfTestResult:
    ok: bool
    reason: str
    error: float = 0.0
    native_error: float = 0.0
