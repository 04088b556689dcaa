"""Where the time of engine steps goes: steps by regime, all of them; operators by their own time, in sampled steps."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polymorph.kernels.buckets import bucket

REST = "rest"
"""Of a step what no operator tells: code that the compiler fused, Python, waiting."""
OTHER = "other"
_FAMILIES: dict[str, tuple[str, ...]] = {
    "linear": (
        "polymorph::linear",
        "_C::onednn_mm",
        "_C::weight_packed_linear",
        "aten::linear",
        "aten::addmm",
        "aten::mm",
        "aten::matmul",
    ),
    "rms_norm": (
        "polymorph::rms_norm",
        "polymorph::fused_add_rms_norm",
        "_C::rms_norm",
        "_C::fused_add_rms_norm",
    ),
    "silu_and_mul": ("polymorph::silu_and_mul", "_C::silu_and_mul", "aten::silu"),
    "rotary": (
        "polymorph::rotary",
        "polymorph::rotary_",
        "polymorph::qk_norm_rotary",
        "_C::rotary_embedding",
    ),
    "moe": ("polymorph::fused_moe", "_C::cpu_fused_moe", "vllm::moe_forward"),
    "attention": ("polymorph::attention", "_C::cpu_attention_with_kv_cache"),
    "sampling": ("polymorph::sampling", "polymorph::top_k_top_p", "aten::sort", "_C::fused_gumbel_argmax"),
}
"""By slot: the operators that do its work, ours and the engine's own."""
FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names}
SLOTTED = frozenset(_FAMILIES)


@dataclass
class Regime:
    """Steps whose number of tokens lies in one bucket; times in nanoseconds."""

    steps: int = 0
    ns: int = 0
    sampled_steps: int = 0
    sampled_ns: int = 0
    families: dict[str, int] = field(default_factory=dict)

    def add_sample(self, document: dict[str, Any]) -> None:
        """One step as `profile_stop` tells it."""
        self.sampled_steps += 1
        self.sampled_ns += document["wall_ns"]
        told = 0
        for name, spent in document["operators"].items():
            family = FAMILY_OF.get(name, OTHER)
            self.families[family] = self.families.get(family, 0) + spent["ns"]
            told += spent["ns"]
        self.families[REST] = self.families.get(REST, 0) + max(0, document["wall_ns"] - told)


class StepProfile:
    """Counts every step, and takes a profile of one in `every_s` seconds; 0 takes none."""

    def __init__(self, ops: Any, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ops = ops
        self.every_s = every_s
        self._clock = clock
        self._next = clock() + every_s
        self._began = 0.0
        self._tokens = 0
        self._sampling = False
        self.regimes: dict[int, Regime] = {}

    def begin(self, tokens: int) -> None:
        """A step of so many tokens begins; one that another step cuts off is forgotten."""
        self.cut()
        self._tokens = tokens
        self._began = self._clock()
        if self.every_s and self._began >= self._next:
            self._next = self._began + self.every_s
            self._sampling = True
            self._ops.profile_start()

    def end(self) -> None:
        """The step that began is done."""
        if not self._tokens:
            return
        regime = self.regimes.setdefault(bucket(self._tokens), Regime())
        regime.steps += 1
        regime.ns += round((self._clock() - self._began) * 1e9)
        if self._sampling:
            regime.add_sample(json.loads(self._ops.profile_stop()))
        self._sampling = False
        self._tokens = 0

    def cut(self) -> None:
        """Whatever runs is not counted."""
        if self._sampling:
            self._ops.profile_stop()
        self._sampling = False
        self._tokens = 0

    def document(self) -> dict[str, Any]:
        """Totals by the upper bound of the bucket, as text."""
        return {str(upper): vars(regime) for upper, regime in sorted(self.regimes.items())}
