"""Real inputs of an operation: as a worker gave them, or as the evaluator's own engine made them of bundled texts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polymorph.evaluator.domain.number import Floats
from polymorph.evaluator.domain.operation import Operation
from polymorph.kernels.buckets import bucket
from polymorph.kernels.schema import CapturedFile, Workload, WorkloadExtension

Source = Literal["captured", "own-engine"]
TRIED = 3
"""Calls of each source that a candidate is checked on."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The activations of one call by their names in the definition, all with the same number of rows."""

    values: Mapping[str, Floats]
    source: Source

    @property
    def m(self) -> int:
        return int(self.values["x"].shape[0])

    def rows(self, m: int) -> dict[str, Floats]:
        """The first `m` rows of each."""
        return {name: value[:m].copy() for name, value in self.values.items()}


@dataclass(frozen=True, slots=True)
class OwnInputs:
    """What the evaluator's own engine gave: each call, its file as it was written, and what the texts were like."""

    definition: str = ""
    calls: tuple[Captured, ...] = ()
    files: tuple[bytes, ...] = ()
    about: Mapping[str, Any] | None = None

    def workload(self, paths: Sequence[str], weight: float) -> Workload:
        """A Workload that says where its inputs come from; `paths` name the files in the object store."""
        captures = [CapturedFile(m=call.m, path=path) for call, path in zip(self.calls, paths, strict=True)]
        largest = max(captures, key=lambda each: each.m)
        extension = WorkloadExtension.model_validate(
            {
                "weight": weight,
                "signature": ",".join(str(upper) for upper in sorted({bucket(c.m) for c in captures})),
                "source_position": "the evaluator's engine, on bundled texts",
                "privacy": "own-engine",
                "captures": captures,
                "definition": self.definition,
                "texts": dict(self.about or {}),
            }
        )
        inputs = {
            name: {"type": "safetensors", "path": largest.path, "tensor_key": name}
            for name in self.calls[0].values
        }
        return Workload(uuid=largest.path[:32], axes={"M": largest.m}, inputs=inputs, x_polymorph=extension)


def activations(op: Operation) -> tuple[str, ...]:
    """The inputs that differ from call to call."""
    return tuple(name for name, spec in op.definition.inputs.items() if spec.shape and spec.shape[0] == "M")


def tried(captured: Iterable[Captured], min_m: int) -> list[tuple[str, Captured]]:
    """The calls that a candidate for M from `min_m` on is checked on, with the names of their cases."""
    found: list[tuple[str, Captured]] = []
    counts: dict[Source, int] = {}
    for call in captured:
        index = counts.get(call.source, 0)
        if call.m >= min_m and index < TRIED:
            counts[call.source] = index + 1
            found.append((f"{call.source}-{index}", call))
    return found
