"""What a self-test is asked and what it answers; needs no torch, so that whoever asks need not load it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SelfTest:
    """`rows` are the numbers of tokens to try; captured rows are repeated or cut to them."""

    definition: str
    library: str
    numerics: str
    calls: tuple[str, ...]
    weight: str | None
    rows: tuple[int, ...]
    threads: int = 1


@dataclass(frozen=True)
class SelfTestResult:
    ok: bool
    reason: str
    error: float = 0.0
    native_error: float = 0.0
