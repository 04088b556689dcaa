"""One case in one candidate's process: its memory is mapped, calls run, and what they wrote is read back."""

from typing import Any, Self

from polymorph.evaluator.adapters.sandbox.lane import Process
from polymorph.evaluator.domain.cases import Case
from polymorph.evaluator.domain.number import Array, poisoned
from polymorph.evaluator.domain.operation import Operation
from polymorph.evaluator.gates.calling import Inputs, Outputs, send_inputs, specs
from polymorph.evaluator.gates.subject import GateFailed

_CHANGED_CONTROL_WORD = -1001


class Trial:
    """Maps what the case needs, runs it as often as is asked, unmaps."""

    def __init__(self, process: Process, op: Operation, case: Case, given: Inputs, call_s: float) -> None:
        self._process, self._op, self._case, self._given, self._call_s = process, op, case, given, call_s
        self._outputs = Outputs(op, case)
        self._specs: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        send_inputs(self._process, self._given)
        self._specs = self._outputs.send(self._process)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._outputs.close()
        if kind is None:
            names = [*self._given.tensors, *(f"out-{name}" for name in self._outputs.windows)]
            self._process.ask("unmap", names=names)

    def run(self, arm: str, *, rubbish: int = 0, weights: str = "") -> Any:
        """The outputs; None where the kernel refused a call that it may refuse."""
        self._outputs.poison()
        given = specs(self._op, self._given)
        return self._ran(self._case.name, given, arm=arm, rubbish=rubbish, weights=weights)

    def in_place(self, arm: str, *, rubbish: int) -> dict[str, Array] | None:
        """The same where outputs lie in the memory of those inputs that the definition lets them share; None where it lets
        none. Only rows that touch lie as an output does.
        """
        aliases = self._op.definition.x_polymorph.output_aliases
        if not aliases or self._case.row_gap:
            return None
        places = dict(zip(self._outputs.windows, self._specs, strict=True))
        given = dict(zip(self._op.definition.inputs, specs(self._op, self._given), strict=True))
        self._outputs.poison()
        for name, source in aliases.items():
            self._outputs.fill(name, self._given.tensors[source])
            given[source] = places[name]
        found = self._ran(
            f"{self._case.name}, in place", list(given.values()), arm=arm, rubbish=rubbish, weights=""
        )
        return dict(found) if found is not None else None

    def _ran(self, label: str, given: list[dict[str, Any]], **order: Any) -> Any:
        answer = self._process.ask(
            "call", load=0, inputs=given, outputs=self._specs, timeout_s=self._call_s, **order
        )
        rc = answer["rc"]
        if rc == _CHANGED_CONTROL_WORD:
            raise GateFailed(f"case {label}: changed the floating-point control word", hack=True)
        if rc != 0:
            if self._case.may_refuse:
                return None
            raise GateFailed(f"case {label}: returned {rc} for M = {self._case.m}, which it claims to serve")
        outputs = self._outputs.read()
        for name, stored in outputs.items():
            left = poisoned(stored, self._op.dtype)
            if left:
                raise GateFailed(f"case {label}: {left} elements of {name} were never written")
        return outputs
