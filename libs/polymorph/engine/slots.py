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
from polymorph.engine.packed import PackedKey, PackedWeights
from polymorph.engine.weights import KeptWeight, WeightStore

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass
class Layer:
    """A layer with weights and a slot. In `kept` stands None where the memory for a weight was not granted; the order is
    that of the definition's packed inputs.
    """

    definition: str
    layer_id: int
    site: int
    kept: tuple[KeptWeight | None, ...]


@dataclass
class Slots:
    """Owns the packed weights and the table. All calls come from the thread that runs the model, between steps."""

    ops: Any
    weights: WeightStore
    packed: PackedWeights
    layers: list[Layer] = field(default_factory=list)
    engaged: list[SlotBinding] = field(default_factory=list)
    staged: list[SlotBinding] | None = None
    missing: dict[str, str] = field(default_factory=dict)
    """Slots that were asked for and are off, with the reason."""
    _layers_of: dict[str, list[Layer]] = field(default_factory=dict)

    def add_layer(
        self, definition: str, layer_id: int, site: int, kept: tuple[KeptWeight | None, ...]
    ) -> Layer:
        """Remembers a layer whose operator has a site."""
        layer = Layer(definition, layer_id, site, kept)
        self.layers.append(layer)
        self._layers_of.setdefault(definition, []).append(layer)
        return layer

    def add_linear(self, weight: Any, native: int, state: Any, *, held_by_model: bool) -> int:
        """Gives a linear layer a slot; returns its id in the compiled graph."""
        n, k = weight.shape
        definition = f"gemm_n{n}_k{k}_{_SHORT[weight.dtype]}"
        layer_id = int(self.ops.add_linear(definition, n, k, native, state))
        kept = self.weights.keep(weight, held_by_model=held_by_model)
        self.add_layer(definition, layer_id, int(self.ops.linear_site(layer_id)), (kept,))
        return layer_id

    def add_moe(self, weights: tuple[Any, ...], topk: int, isa: str) -> int:
        """Gives the experts of a layer a slot; returns their id in the compiled graph. `weights` are w13 and w2."""
        experts, rows, hidden = weights[0].shape
        shape = f"e{experts}_k{topk}_h{hidden}_i{rows // 2}"
        definition = f"moe_{shape}_{_SHORT[weights[0].dtype]}"
        layer_id = int(self.ops.add_moe(definition, experts, isa))
        kept = tuple(self.weights.keep(weight, held_by_model=False) for weight in weights)
        self.add_layer(definition, layer_id, int(self.ops.moe_site(layer_id)), kept)
        return layer_id

    def reload_moe(self, layer_id: int, weights: tuple[Any, ...]) -> None:
        """The experts' weights were loaded anew: likewise."""
        site = int(self.ops.moe_site(layer_id))
        layer = next(each for each in self.layers if each.site == site)
        self.reload(layer, weights, held_by_model=False)

    def reload_linear(
        self, layer_id: int, weight: Any, native: int, state: Any, *, held_by_model: bool
    ) -> None:
        """The layer's weight was loaded anew: what was packed from the old one is dropped, all slots are emptied."""
        self.ops.update_linear(layer_id, native, state)
        layer = next(
            each for each in self.layers if each.layer_id == layer_id and each.definition.startswith("gemm_")
        )
        self.reload(layer, (weight,), held_by_model=held_by_model)

    def reload(self, layer: Layer, weights: tuple[Any, ...], *, held_by_model: bool) -> None:
        """The layer's weights were loaded anew: what was packed from the old ones is dropped, all slots are emptied."""
        self.clear()
        for kept in layer.kept:
            if kept is not None:
                self.weights.forget(kept)
        layer.kept = tuple(self.weights.keep(weight, held_by_model=held_by_model) for weight in weights)

    def definitions(self) -> list[str]:
        """Every definition that has a slot; those without weights appear with their first call."""
        return sorted({*json.loads(self.ops.read_counters(False))["definitions"]})

    def prepare(self, documents: Iterable[Mapping[str, Any]], seconds: float) -> int:
        """Packs weights for about `seconds`; returns how many are left. Serving goes on between two calls.

        Raises:
            BindingRefused: a binding that cannot run here.
        """
        return self._pack_until(time.monotonic() + seconds, checked(documents, self.definitions()))

    def stage(self, documents: Iterable[Mapping[str, Any]], seconds: float = math.inf) -> int:
        """Makes everything ready for `flip`, and changes nothing that runs: of several ranks each stages, then all flip.

        Packs weights for about `seconds`; returns how many are left, and with any left nothing is staged.

        Raises:
            BindingRefused: a binding that cannot run here.
            ValueError, RuntimeError: likewise, by the dispatcher.
        """
        bindings = checked(documents, self.definitions())
        left = self._pack_until(time.monotonic() + seconds, bindings)
        if left:
            return left
        with self._freed_on_refusal():
            self.ops.table_begin()
            for binding in bindings:
                self._fill(binding)
        self.staged = bindings
        return 0

    def flip(self, *, keep_packed: bool = False) -> int:
        """Makes what was staged the whole table; returns its epoch. Of packed weights that it does not use a few stay for a
        way back, or all of them where they are soon to be used again.

        Raises:
            BindingRefused: nothing was staged.
        """
        if self.staged is None:
            raise BindingRefused("nothing was staged: stage a table first")
        epoch = int(self.ops.table_commit())
        self.engaged, self.staged = self.staged, None
        self.packed.put_in_force(self._used(self.engaged), keep_all=keep_packed)
        return epoch

    def abandon(self) -> None:
        """Drops what was staged, with what was packed for it."""
        self.staged = None
        self.ops.table_abandon()
        self.packed.abandon()

    def engage(self, documents: Iterable[Mapping[str, Any]], *, keep_packed: bool = False) -> int:
        """Stages and flips at once; returns the epoch.

        Raises:
            BindingRefused: a binding that cannot run here; the old table stays.
            ValueError, RuntimeError: likewise, by the dispatcher.
        """
        self.stage(documents)
        return self.flip(keep_packed=keep_packed)

    def clear(self) -> int:
        """Every slot runs the engine's own code again, and packed weights are freed."""
        epoch = self.engage([])
        self.packed.clear()
        return epoch

    def layer_of_site(self, site: int) -> Layer | None:
        return next((layer for layer in self.layers if layer.site == site), None)

    def _served_by(self, binding: SlotBinding) -> list[Layer]:
        return self._layers_of.get(binding.definition, [])

    def _pack_until(self, until: float, bindings: list[SlotBinding]) -> int:
        with self._freed_on_refusal():
            missing = self._missing(bindings)
            needed = self._used(bindings)
            while missing:
                self._pack(*missing.pop(), needed)
                # One at least: of large models what stands above takes the time there is.
                if time.monotonic() >= until:
                    break
        return len(missing)

    @contextlib.contextmanager
    def _freed_on_refusal(self) -> Iterator[None]:
        """What was packed for refused bindings would take the budget of those that come after."""
        try:
            yield
        except (ValueError, RuntimeError):
            self.abandon()
            raise

    def _missing(self, bindings: list[SlotBinding]) -> list[tuple[KeptWeight, SlotBinding]]:
        wanted: dict[tuple[int, str], tuple[KeptWeight, SlotBinding]] = {}
        for binding in bindings:
            for layer in self._served_by(binding):
                for kept in self._granted(layer):
                    key = (kept.key, _layout(binding))
                    if key not in self.packed:
                        wanted.setdefault(key, (kept, binding))
        return list(wanted.values())

    def _granted(self, layer: Layer) -> list[KeptWeight]:
        granted = [kept for kept in layer.kept if kept is not None]
        if len(granted) < len(layer.kept):
            raise BindingRefused(
                f"{layer.definition}: the weight of layer {layer.layer_id} was not kept: "
                f"{self.weights.refused} weights lay beyond the budget for kept weights; raise it"
            )
        return granted

    def _pack(self, kept: KeptWeight, binding: SlotBinding, needed: set[PackedKey]) -> None:
        weight = kept.restore()
        try:
            packed = weight
            if self.ops.packs(binding.path):
                packed = self.ops.pack(binding.path, binding.artifact, weight)
            self.packed.add((kept.key, _layout(binding)), packed, needed)
        except (ValueError, RuntimeError) as error:
            raise BindingRefused(f"{binding.definition}: {str(error).splitlines()[0]}") from error

    def _fill(self, binding: SlotBinding) -> None:
        packed_at = {
            layer.site: [self.packed[kept.key, _layout(binding)] for kept in self._granted(layer)]
            for layer in self._served_by(binding)
        }
        for site in packed_at or self.ops.sites_of(binding.definition):
            for index in binding.buckets():
                self.ops.table_set(
                    site,
                    index,
                    binding.path,
                    binding.artifact,
                    packed_at.get(site, []),
                    binding.least,
                    binding.most,
                )

    def _used(self, bindings: Iterable[SlotBinding]) -> set[PackedKey]:
        return {
            (kept.key, _layout(binding))
            for binding in bindings
            for layer in self._served_by(binding)
            for kept in layer.kept
            if kept is not None
        }


def _layout(binding: SlotBinding) -> str:
    # A kernel whose manifest names no layout shares its packing with no other.
    return binding.layout or f"artifact:{binding.artifact}"
