"""vLLM's worker extension: imported in the engine's process before the model loads, it installs the slots.

`--worker-extension-cls polymorph.engine.extension.PolymorphExtension`; `EngineLaunch` sets it with the environment that
it reads.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from polymorph.engine.bindings import BindingRefused
from polymorph.engine.capture import collect
from polymorph.engine.flight import FLIGHT_VARIABLE, path_of, rank_of_all
from polymorph.engine.installation import Installation

_MIB = 1 << 20

_INSTALLED = Installation.make()
_SLOTS: Any = _INSTALLED.slots
_STEPS: Any = _INSTALLED.steps
_DIRECTORY: str | None = None


@_INSTALLED.answering
class PolymorphExtension:
    """Calls for `collective_rpc`; each runs between two engine steps and answers with plain values.

    A refusal is an answer ({"ok": False, "reason": ...}), never an exception: an exception in a worker's call is for
    vLLM a reason to worry.
    """

    def slots_describe(self) -> dict[str, Any]:
        """Definitions with a slot, how many layers share each, what is engaged, and slots that are off, with the reason."""
        self._record_flight()
        layers: dict[str, int] = {}
        for layer in _SLOTS.layers:
            layers[layer.definition] = layers.get(layer.definition, 0) + 1
        return {
            "definitions": {name: layers.get(name, 0) for name in _SLOTS.definitions()},
            "engaged": [vars(binding) for binding in _SLOTS.engaged],
            "missing": dict(_SLOTS.missing),
            "libraries": sorted(_SLOTS.ops.loaded_libraries()),
            "threads": int(_SLOTS.ops.threads()),
            "kept_bytes": _SLOTS.weights.bytes,
            "packed_bytes": _SLOTS.packed.bytes,
        }

    def slots_prepare(self, bindings: list[dict[str, Any]], seconds: float = 0.05) -> dict[str, Any]:
        """Packs weights for about `seconds`; call it until `left` is 0, then engage."""
        try:
            return {"ok": True, "reason": "", "left": _SLOTS.prepare(bindings, seconds)}
        except BindingRefused as error:
            return {"ok": False, "reason": str(error), "left": 0}

    def slots_stage(self, bindings: list[dict[str, Any]], seconds: float = math.inf) -> dict[str, Any]:
        """Makes a whole new table ready, and changes nothing that runs. Of several ranks each stages; where all could,
        `slots_flip` follows on all, else `slots_abandon`.

        Packs weights for about `seconds`: where `left` of them are to be packed still, nothing is staged yet.
        """
        try:
            self._record_flight()
            left = _SLOTS.stage(bindings, seconds)
        except (BindingRefused, ValueError, RuntimeError) as error:
            return {"ok": False, "reason": str(error).splitlines()[0], "left": 0}
        return {"ok": True, "reason": "", "left": left}

    def slots_flip(self, *, keep_packed: bool = False) -> dict[str, Any]:
        """Engages what was staged; `step` is how many steps this rank had computed, the same on all of them, and `counted`
        is what `slots_read` told until then.

        `keep_packed` keeps packed weights that the new table does not use, for a switch back.
        """
        began = time.monotonic()
        try:
            epoch = _SLOTS.flip(keep_packed=keep_packed)
        except BindingRefused as error:
            return {"ok": False, "reason": str(error)}
        seconds = time.monotonic() - began
        return {
            "ok": True,
            "reason": "",
            "epoch": epoch,
            "step": _STEPS.count if _STEPS.known else None,
            "seconds": seconds,
            "bytes": _SLOTS.packed.bytes,
            "counted": self.slots_read(),
        }

    def slots_abandon(self) -> dict[str, Any]:
        """Forgets what was staged."""
        _SLOTS.abandon()
        return {"ok": True, "reason": ""}

    def slots_engage(
        self, bindings: list[dict[str, Any]], seconds: float = math.inf, *, keep_packed: bool = False
    ) -> dict[str, Any]:
        """Stages and flips at once, where there is one rank; where it is refused, or has weights `left` to pack after
        about `seconds`, the old table stays.
        """
        began = time.monotonic()
        answer = self.slots_stage(bindings, seconds)
        if not answer["ok"] or answer["left"]:
            return answer
        flipped = self.slots_flip(keep_packed=keep_packed)
        return flipped | {"seconds": time.monotonic() - began, "left": 0}

    def slots_clear(self) -> dict[str, Any]:
        """Every slot runs the engine's own code."""
        return self.slots_engage([])

    def slots_read(self, reset: bool = False) -> dict[str, Any]:
        """Calls and nanoseconds by definition and bucket, native and by artifact, with the errors of each; steps by bucket
        with the time of each family of operators in those that were profiled.
        """
        document: dict[str, Any] = json.loads(_SLOTS.ops.read_counters(reset))
        steps = _STEPS.profile.document()
        if reset:
            _STEPS.profile.regimes = {}
        return document | {"steps": steps}

    def slots_profile(self, every_s: float) -> dict[str, Any]:
        """Takes the profile of one step in so many seconds from now on; 0 takes none."""
        if not every_s >= 0:
            return {"ok": False, "reason": f"a profile every {every_s} s: 0 for none, or some seconds"}
        _STEPS.profile.every_s = every_s
        return {"ok": True, "reason": ""}

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
        ring: bool = False,
    ) -> dict[str, Any]:
        """Copies the inputs of one in `every` of the next calls, `calls` of them at most: the first that come, as a ring
        the last that came. `slots_captured` writes them.
        """
        global _DIRECTORY  # noqa: PLW0603 - one capture at a time, as in the dispatcher
        _DIRECTORY = directory
        try:
            _SLOTS.ops.capture_start(definition, calls, every, max_mib * _MIB, min_m, max_m, ring)
        except (ValueError, RuntimeError) as error:
            return {"ok": False, "reason": str(error).splitlines()[0]}
        return {"ok": True, "reason": ""}

    def slots_captured(self, directory: str | None = None, *, weight: bool = False) -> dict[str, Any]:
        """Ends the capture and writes it to a folder that only this user may enter; paths of calls, and with `weight` of
        what the first call's layer packs.
        """
        folder = directory or _DIRECTORY
        if folder is None:
            return {"ok": False, "reason": "name the directory for what was captured"}
        return collect(_SLOTS, Path(folder), weight=weight)

    def slots_capture_stop(self) -> dict[str, Any]:
        """Ends the capture and forgets what it held."""
        _SLOTS.ops.capture_finish()
        return {"ok": True, "reason": ""}

    def _record_flight(self) -> None:
        """Each rank's record of the kernel that it calls, for whoever finds it dead or silent."""
        folder = os.environ.get(FLIGHT_VARIABLE)
        if folder and not getattr(self, "_flight", False):
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            _SLOTS.ops.open_flight(str(path_of(Path(folder), rank_of_all(self))))
            self._flight = True
