"""vLLM's worker extension: imported in the engine's process before the model loads, it installs the slots.

`--worker-extension-cls polymorph.engine.extension.PolymorphExtension`; `EngineLaunch` sets it with the environment that
it reads.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from polymorph.engine import vllm_patch
from polymorph.engine.bindings import BindingRefused
from polymorph.engine.capture import collect
from polymorph.engine.dispatcher.ops import load
from polymorph.engine.launch import on_cpu
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore

SLOTS_VARIABLE = "POLYMORPH_SLOTS"
KEPT_VARIABLE = "POLYMORPH_KEPT_WEIGHTS_MIB"
PACKED_VARIABLE = "POLYMORPH_PACKED_WEIGHTS_MIB"
_MIB = 1 << 20


def _install() -> Slots:
    wanted = {name for name in os.environ.get(SLOTS_VARIABLE, "linear").split(",") if name}
    unknown = wanted - {"linear", "rms_norm"}
    if unknown:
        raise ValueError(f"{SLOTS_VARIABLE} names {', '.join(sorted(unknown))}: use linear, rms_norm")
    slots = Slots(
        ops=load(),
        weights=WeightStore(int(os.environ.get(KEPT_VARIABLE, "4096")) * _MIB),
        packed_budget=int(os.environ.get(PACKED_VARIABLE, "4096")) * _MIB,
    )
    if "linear" in wanted:
        vllm_patch.slot_linear_layers(slots)
    if "rms_norm" in wanted:
        vllm_patch.slot_norms(slots.ops)
    if on_cpu():
        vllm_patch.shorten_spin()
    return slots


_SLOTS = _install()
_DIRECTORY: str | None = None


class PolymorphExtension:
    """Calls for `collective_rpc`; each runs between two engine steps and answers with plain values.

    A refusal is an answer ({"ok": False, "reason": ...}), never an exception: an exception in a worker's call is for
    vLLM a reason to worry.
    """

    def slots_describe(self) -> dict[str, Any]:
        """Definitions with a slot, how many layers share each, and what is engaged."""
        layers: dict[str, int] = {}
        for layer in _SLOTS.layers:
            layers[layer.definition] = layers.get(layer.definition, 0) + 1
        return {
            "definitions": {name: layers.get(name, 0) for name in _SLOTS.definitions()},
            "engaged": [vars(binding) for binding in _SLOTS.engaged],
            "threads": int(_SLOTS.ops.threads()),
            "kept_bytes": _SLOTS.weights.bytes,
            "packed_bytes": _SLOTS.packed_bytes(),
        }

    def slots_prepare(self, bindings: list[dict[str, Any]], seconds: float = 0.05) -> dict[str, Any]:
        """Packs weights for about `seconds`; call it until `left` is 0, then engage."""
        try:
            return {"ok": True, "reason": "", "left": _SLOTS.prepare(bindings, seconds)}
        except BindingRefused as error:
            return {"ok": False, "reason": str(error), "left": 0}

    def slots_engage(self, bindings: list[dict[str, Any]], *, keep_packed: bool = False) -> dict[str, Any]:
        """Makes the bindings the whole new table; where one is refused the old table stays.

        `keep_packed` keeps packed weights that the new table does not use, for a switch back.
        """
        began = time.monotonic()
        try:
            epoch = _SLOTS.engage(bindings, keep_packed=keep_packed)
        except (BindingRefused, ValueError, RuntimeError) as error:
            return {"ok": False, "reason": str(error).splitlines()[0]}
        seconds = time.monotonic() - began
        return {
            "ok": True,
            "reason": "",
            "epoch": epoch,
            "seconds": seconds,
            "bytes": _SLOTS.packed_bytes(),
        }

    def slots_clear(self) -> dict[str, Any]:
        """Every slot runs the engine's own code."""
        return self.slots_engage([])

    def slots_read(self, reset: bool = False) -> dict[str, Any]:
        """Calls and nanoseconds by definition and bucket, native and by artifact, with the errors of each."""
        document: dict[str, Any] = json.loads(_SLOTS.ops.read_counters(reset))
        return document

    def slots_capture(
        self,
        definition: str,
        calls: int,
        directory: str | None = None,
        *,
        every: int = 1,
        max_mib: int = 64,
        min_m: int = 1,
        max_m: int = 1 << 30,
    ) -> dict[str, Any]:
        """Copies the inputs of one in `every` of the next calls, `calls` of them at most; `slots_captured` writes them."""
        global _DIRECTORY  # noqa: PLW0603 - one capture at a time, as in the dispatcher
        _DIRECTORY = directory
        try:
            _SLOTS.ops.capture_start(definition, calls, every, max_mib * _MIB, min_m, max_m)
        except (ValueError, RuntimeError) as error:
            return {"ok": False, "reason": str(error).splitlines()[0]}
        return {"ok": True, "reason": ""}

    def slots_captured(self, directory: str | None = None) -> dict[str, Any]:
        """Ends the capture and writes it to a folder that only this user may enter; paths of calls and weights."""
        folder = directory or _DIRECTORY
        if folder is None:
            return {"ok": False, "reason": "name the directory for what was captured"}
        return collect(_SLOTS, Path(folder))
