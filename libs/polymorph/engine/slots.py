"""The slots of one engine process: which layers have one, what they run, what they served."""

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from polymorph.engine.bindings import BindingRefused, SlotBinding, checked
from polymorph.engine.weights import KeptWeight, WeightStore

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass
class LinearLayer:
    """A linear layer with a slot. `kept` is None where the memory for its weight was not granted."""

    definition: str
    layer_id: int
    site: int
    kept: KeptWeight | None


@dataclass
class Slots:
    """Owns the packed weights and the table. All calls come from the thread that runs the model, between steps."""

    ops: Any
    weights: WeightStore
    packed_budget: int
    layers: list[LinearLayer] = field(default_factory=list)
    engaged: list[SlotBinding] = field(default_factory=list)
    _packed: dict[tuple[int, str], Any] = field(default_factory=dict)

    def add_linear(self, weight: Any, native: int, state: Any, *, held_by_model: bool) -> int:
        """Gives a layer a slot; returns its id in the compiled graph."""
        n, k = weight.shape
        definition = f"gemm_n{n}_k{k}_{_SHORT[weight.dtype]}"
        layer_id = int(self.ops.add_linear(definition, n, k, native, state))
        kept = self.weights.keep(weight, held_by_model=held_by_model)
        self.layers.append(LinearLayer(definition, layer_id, int(self.ops.linear_site(layer_id)), kept))
        return layer_id

    def reload_linear(
        self, layer_id: int, weight: Any, native: int, state: Any, *, held_by_model: bool
    ) -> None:
        """The layer's weight was loaded anew: what was packed from the old one is dropped, all slots are emptied."""
        self.clear()
        layer = next(each for each in self.layers if each.layer_id == layer_id)
        if layer.kept is not None:
            self.weights.forget(layer.kept)
        self.ops.update_linear(layer_id, native, state)
        layer.kept = self.weights.keep(weight, held_by_model=held_by_model)

    def definitions(self) -> list[str]:
        """Every definition that has a slot; norms appear with their first call."""
        return sorted({*json.loads(self.ops.read_counters(False))["definitions"]})

    def prepare(self, documents: Iterable[Mapping[str, Any]], seconds: float) -> int:
        """Packs weights for about `seconds`; returns how many are left. Serving goes on between two calls.

        Raises:
            BindingRefused: a binding that cannot run here.
        """
        return self._pack_until(time.monotonic() + seconds, checked(documents, self.definitions()))

    def engage(self, documents: Iterable[Mapping[str, Any]], *, keep_packed: bool = False) -> int:
        """Makes the bindings the whole new table; returns its epoch. Packed weights that it does not use are freed,
        unless they are soon to be used again.

        Raises:
            BindingRefused: a binding that cannot run here; the old table stays.
            ValueError, RuntimeError: likewise, by the dispatcher.
        """
        bindings = checked(documents, self.definitions())
        self._pack_until(math.inf, bindings)
        with self._freed_on_refusal():
            self.ops.table_begin()
            for binding in bindings:
                self._fill(binding)
            epoch = int(self.ops.table_commit())
        self.engaged = bindings
        if not keep_packed:
            self._drop_unused()
        return epoch

    def clear(self) -> int:
        """Every slot runs the engine's own code again, and packed weights are freed."""
        return self.engage([])

    def packed_bytes(self) -> int:
        """Bytes of packed weights, without those that are the model's own."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._packed.values())

    def layer_of_site(self, site: int) -> LinearLayer | None:
        return next((layer for layer in self.layers if layer.site == site), None)

    def _served_by(self, binding: SlotBinding) -> list[LinearLayer]:
        return [layer for layer in self.layers if layer.definition == binding.definition]

    def _pack_until(self, until: float, bindings: list[SlotBinding]) -> int:
        with self._freed_on_refusal():
            missing = self._missing(bindings)
            while missing and time.monotonic() < until:
                self._pack(*missing.pop())
        return len(missing)

    @contextlib.contextmanager
    def _freed_on_refusal(self) -> Iterator[None]:
        """What was packed for refused bindings would take the budget of those that come after."""
        try:
            yield
        except (ValueError, RuntimeError):
            self._drop_unused()
            raise

    def _missing(self, bindings: list[SlotBinding]) -> list[tuple[LinearLayer, SlotBinding]]:
        wanted: dict[tuple[int, str], tuple[LinearLayer, SlotBinding]] = {}
        for binding in bindings:
            for layer in self._served_by(binding):
                key = self._key(layer, binding)
                if key not in self._packed:
                    wanted.setdefault(key, (layer, binding))
        return list(wanted.values())

    def _key(self, layer: LinearLayer, binding: SlotBinding) -> tuple[int, str]:
        if layer.kept is None:
            raise BindingRefused(
                f"{binding.definition}: the weight of layer {layer.layer_id} was not kept: "
                f"{self.weights.refused} weights lay beyond the budget for kept weights; raise it"
            )
        return layer.kept.key, _layout(binding)

    def _pack(self, layer: LinearLayer, binding: SlotBinding) -> None:
        key = self._key(layer, binding)
        if layer.kept is None:
            return
        weight = layer.kept.restore()
        try:
            packed = self.ops.pack(binding.path, weight) if self.ops.packs(binding.path) else weight
        except (ValueError, RuntimeError) as error:
            raise BindingRefused(f"{binding.definition}: {str(error).splitlines()[0]}") from error
        size = packed.numel() * packed.element_size()
        if self.packed_bytes() + size > self.packed_budget:
            raise BindingRefused(
                f"{binding.definition}: packed weights would take more than the budget of "
                f"{self.packed_budget >> 20} MiB"
            )
        self._packed[key] = packed

    def _fill(self, binding: SlotBinding) -> None:
        layers = self._served_by(binding)
        for index in binding.buckets():
            for layer in layers:
                packed = self._packed[self._key(layer, binding)]
                self.ops.table_set(layer.site, index, binding.path, binding.artifact, packed)
            if not layers:
                for site in self.ops.sites_of(binding.definition):
                    self.ops.table_set(site, index, binding.path, binding.artifact, None)

    def _drop_unused(self) -> None:
        used = {self._key(layer, binding) for binding in self.engaged for layer in self._served_by(binding)}
        self._packed = {key: packed for key, packed in self._packed.items() if key in used}


def _layout(binding: SlotBinding) -> str:
    # A kernel whose manifest names no layout shares its packing with no other.
    return binding.layout or f"artifact:{binding.artifact}"
