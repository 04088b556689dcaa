"""Lays the calls of a self-test out in memory that the judge shares with the kernel's process."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from polymorph.engine.selftest_inputs import Inputs, Sample
from polymorph.engine.selftest_reference import reference
from polymorph.engine.selftest_runner import Call
from polymorph.kernels.load import DtypeCode, Tensor
from polymorph.kernels.schema import Definition
from polymorph.sandbox.guarded import Guarded

_POISON = b"\xff"  # as a float that is no number


@dataclass(frozen=True)
class Trial:
    """One call with the memory that it is given. `inputs` are values, whatever the kernel does to that memory."""

    label: str
    inputs: Inputs
    native: dict[str, Any]
    outputs: dict[str, Any]
    written: tuple[Guarded, ...]
    call: Call


class Memory:
    """Lays values out in memory for the kernel's process; what several trials read lies there once."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self.read: list[Guarded] = []
        self.written: list[Guarded] = []
        self._placed: dict[int, tuple[Any, Any]] = {}

    def trials(self, sample: Sample) -> Iterator[Trial]:
        """The call with memory of its own for each output, and in place where outputs may share an input's."""
        native = reference(self._definition, sample.inputs, None)
        yield self._trial(sample.label, sample.inputs, native, {})
        aliases = {
            output: source
            for output, source in self._definition.x_polymorph.output_aliases.items()
            if _alike(native[output], sample.inputs.get(source))
        }
        if aliases:
            yield self._trial(f"{sample.label}, in place", sample.inputs, native, aliases)

    def _trial(self, label: str, inputs: Inputs, native: dict[str, Any], aliases: dict[str, str]) -> Trial:
        first = len(self.written)
        outputs = {name: self._output(like) for name, like in native.items()}
        shared = {}
        for name, source in aliases.items():
            outputs[name].copy_(inputs[source])
            shared[source] = outputs[name]
        placed = {name: shared.get(name, self._input(tensor)) for name, tensor in inputs.items()}
        call = Call(
            inputs=tuple(None if tensor is None else _view(tensor) for tensor in placed.values()),
            outputs=tuple(_view(tensor) for tensor in outputs.values()),
            packed=frozenset(
                index
                for index, name in enumerate(placed)
                if name in self._definition.x_polymorph.packed_inputs
            ),
        )
        return Trial(label, inputs, native, outputs, tuple(self.written[first:]), call)

    def _input(self, tensor: Any) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in self._placed:
            region = Guarded(tensor.numel() * tensor.element_size())
            self.read.append(region)
            self._placed[id(tensor)] = tensor, _over(region, tensor)
            self._placed[id(tensor)][1].copy_(tensor)
        return self._placed[id(tensor)][1]

    def _output(self, like: Any) -> Any:
        region = Guarded(like.numel() * like.element_size())
        self.written.append(region)
        region.view()[:] = _POISON * region.length
        return _over(region, like)


def _alike(output: Any, source: Any) -> bool:
    return source is not None and source.shape == output.shape and source.dtype is output.dtype


def _over(region: Guarded, like: Any) -> Any:
    if region.length == 0:
        return torch.empty_like(like)
    return torch.frombuffer(region.view(), dtype=like.dtype).view(like.shape)


def _view(tensor: Any) -> Tensor:
    return Tensor.at(
        tensor.data_ptr(), tuple(tensor.shape), DtypeCode[str(tensor.dtype).removeprefix("torch.")]
    )
