"""What is being evaluated, and against what."""

import secrets
from dataclasses import dataclass, field

from polymorph.evaluator.domain.captured import Captured
from polymorph.evaluator.domain.operation import Operation
from polymorph.kernels.schema import Solution


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The artifact that serves this operation now."""

    artifact: str
    content: bytes
    packs: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """One candidate with the range of M it is for. `typical` maps M to its share of the operation's live time."""

    solution: Solution
    operation: Operation
    min_m: int
    max_m: int
    typical: dict[int, float]
    incumbent: Incumbent | None = None
    captured: tuple[Captured, ...] = ()
    seed: int = field(default_factory=lambda: secrets.randbits(64))

    @property
    def heaviest(self) -> int:
        return max(self.typical, key=lambda m: self.typical[m])


class GateFailed(Exception):
    """Ends a gate early; carries the sentence for the candidate's author."""

    def __init__(self, reason: str, *, hack: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hack = hack
