"""The patterns of rms_norm and fused_add_rms_norm."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from polymorph.compiler.domain.agents.choices import as_text, changes, from_text
from polymorph.compiler.domain.agents.linear import VECTORS
from polymorph.kernels.catalogue.norms import norm_sources
from polymorph.kernels.catalogue.solution import ONE_THREAD
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Definition, SourceFile


@dataclass(frozen=True)
class NormPattern:
    """One kernel. `keep`: rows stay widened in scratch between the two passes; `grain`: rows of a thread at least."""

    isa: Isa
    lanes: int = 8
    chains: int = 2
    keep: bool = False
    grain: int = 4

    def params(self) -> dict[str, str]:
        return as_text(self)

    def label(self) -> str:
        threads = "one-thread" if self.grain == ONE_THREAD else f"grain{self.grain}"
        return f"{'kept' if self.keep else 'reread'}-x{self.chains}-{threads}"


class NormVocabulary:
    """The patterns that fit one normalisation at M up to max_m on a machine of one tier."""

    pattern = "vector-norm"
    layout_source: str | None = None

    def __init__(self, definition: Definition, max_m: int, isa: Isa) -> None:
        self._definition = definition
        self._fused = "residual" in definition.inputs
        self._dtype = definition.inputs["x"].dtype
        self._max_m = max_m
        self._isa = isa
        # The dot products of the highest tier do nothing for a norm.
        self._tiers = tuple(tier for tier in Isa if isa.runs(tier) and tier is not Isa.AVX512_BF16)
        self._choices: Mapping[str, tuple[Any, ...]] = {
            "grain": (ONE_THREAD, 1, 2, 4, 8, 16, 32),
            "chains": (1, 2, 4),
            "keep": (False, True),
            "lanes": VECTORS[isa],
            "isa": self._tiers,
        }

    def bases(self) -> Iterator[NormPattern]:
        tier = max(self._tiers)
        base = NormPattern(isa=tier, lanes=VECTORS[tier][0], grain=ONE_THREAD if self._max_m <= 4 else 4)
        fitting = self.canonical(base)
        if fitting is not None:
            yield fitting

    def neighbours(self, pattern: NormPattern) -> Iterator[NormPattern]:
        for changed in changes(pattern, self._choices):
            fitting = self.canonical(changed)
            if fitting is not None and fitting != pattern:
                yield fitting

    def parse(self, params: Mapping[str, str]) -> NormPattern | None:
        pattern = from_text(NormPattern, params)
        return None if pattern is None else self.canonical(pattern)

    def canonical(self, pattern: NormPattern) -> NormPattern | None:
        """The pattern with choices that make no difference here at their defaults; None where it cannot work."""
        if pattern.isa not in self._tiers:
            return None
        if pattern.lanes not in VECTORS[pattern.isa]:
            pattern = replace(pattern, lanes=VECTORS[pattern.isa][0])
        if pattern.grain >= self._max_m:
            pattern = replace(pattern, grain=ONE_THREAD)
        if self._fused and self._dtype == "bfloat16":
            pattern = replace(pattern, keep=True)
        return pattern if pattern.grain in self._choices["grain"] else None

    def sources(self, pattern: NormPattern) -> tuple[SourceFile, ...]:
        return norm_sources(
            self._definition,
            lanes=pattern.lanes,
            chains=pattern.chains,
            keep=pattern.keep,
            grain=pattern.grain,
        )
