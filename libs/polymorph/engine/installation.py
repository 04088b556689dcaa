"""The slots of this process: installed when the engine's process imports the extension, or the reason why none are."""

import logging
import os
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from polymorph.engine.disable import STOCK, VARIABLE, Disabled
from polymorph.engine.dispatcher.build import DispatcherBuildError, source_digest
from polymorph.engine.dispatcher.ops import load
from polymorph.engine.hooks import HOOKS, graphs, spin
from polymorph.engine.hooks.hook import hindrance
from polymorph.engine.hooks.steps import Steps
from polymorph.engine.launch import DEFAULT_SLOTS, on_cpu
from polymorph.engine.packed import PackedWeights
from polymorph.engine.profile import StepProfile
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore

SLOTS_VARIABLE = "POLYMORPH_SLOTS"
KEPT_VARIABLE = "POLYMORPH_KEPT_WEIGHTS_MIB"
PACKED_VARIABLE = "POLYMORPH_PACKED_WEIGHTS_MIB"
PROFILE_VARIABLE = "POLYMORPH_PROFILE_EVERY_S"
_MIB = 1 << 20
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass
class Installation:
    """`slots` is None where this engine runs stock code, and `off` says why."""

    slots: Slots | None = None
    off: str = ""
    steps: Steps | None = None

    @classmethod
    def make(cls) -> Self:
        """Puts the slots that were asked for into vLLM, each where its hook's probe passes.

        Raises:
            ValueError: a slot is named that does not exist.
        """
        wanted, disabled = _wanted(), Disabled.read()
        disabled.check(HOOKS)
        ops, off = _load(disabled)
        if off:
            return cls(off=off)
        slots = _slots(ops)
        _install(slots, wanted, disabled)
        steps = Steps(StepProfile(ops, float(os.environ.get(PROFILE_VARIABLE, "10"))))
        steps.install()
        return cls(slots, steps=steps)

    def answering(self, extension: type[_T]) -> type[_T]:
        """The extension, or, where the engine runs stock code, one that answers each of its calls with a refusal."""
        if self.slots is not None:
            return extension

        def refuse(worker: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
            del worker, arguments, named
            return {
                "ok": False,
                "reason": self.off,
                "definitions": {},
                "engaged": [],
                "missing": dict.fromkeys(_wanted(), self.off),
            }

        for name in [each for each in vars(extension) if not each.startswith("_")]:
            setattr(extension, name, refuse)
        return extension


def _wanted() -> list[str]:
    """Slots that were asked for, by name.

    Raises:
        ValueError: a name that no hook has.
    """
    named = [name for name in os.environ.get(SLOTS_VARIABLE, ",".join(DEFAULT_SLOTS)).split(",") if name]
    unknown = set(named) - HOOKS.keys()
    if unknown:
        raise ValueError(f"{SLOTS_VARIABLE} names {', '.join(sorted(unknown))}: use {', '.join(HOOKS)}")
    return list(dict.fromkeys(named))


def _load(disabled: Disabled) -> tuple[Any, str]:
    """The dispatcher, or why this engine runs stock code."""
    if disabled.everything:
        return None, STOCK
    if not on_cpu():
        return None, "these slots are for vLLM on CPUs: this engine runs stock code"
    try:
        return load(), ""
    except DispatcherBuildError as error:
        _log.error("all slots are off, the engine runs its own code: %s", error)
        return None, f"the dispatcher is not built: {error}"


def _slots(ops: Any) -> Slots:
    return Slots(
        ops=ops,
        weights=WeightStore(int(os.environ.get(KEPT_VARIABLE, "4096")) * _MIB),
        packed=PackedWeights(int(os.environ.get(PACKED_VARIABLE, "4096")) * _MIB),
    )


def _install(slots: Slots, wanted: list[str], disabled: Disabled) -> None:
    installed = []
    for name in wanted:
        reason = f"{VARIABLE} names it" if name in disabled.slots else HOOKS[name].hindrance()
        if reason is None:
            HOOKS[name].install(slots)
            installed.append(name)
        else:
            _log.error("the slot %s is off, the engine runs its own code there: %s", name, reason)
            slots.missing[name] = reason
    _tell_graphs(installed)
    _shorten_spin()


def _tell_graphs(installed: list[str]) -> None:
    reason = hindrance(graphs.probe)
    if reason is None:
        graphs.mark(f"{','.join(installed)}-{source_digest()}")
    elif installed:
        os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
        _log.error("vLLM's graph cache cannot be told of slots, so this engine goes without it: %s", reason)


def _shorten_spin() -> None:
    reason = hindrance(spin.probe)
    if reason is None:
        spin.shorten_spin()
    else:
        _log.error("an idle engine process keeps its core as long as vLLM likes: %s", reason)
