"""The patterns of a linear layer's kernel: how the weight is packed, and how the loops are blocked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from polymorph.compiler.domain.agents.choices import as_text, changes, from_text
from polymorph.compiler.domain.agents.sources import render
from polymorph.kernels.isa import LANES, Isa
from polymorph.kernels.schema import Definition, SourceFile

STORAGES = {"float32": ("float", 1), "bfloat16": ("uint16_t", 1), "pairs": ("uint16_t", 2)}
"""How packed weights are stored: the C++ type, and how many values of K lie side by side."""
GIVEN = {"float32": ("float", "PM_F32"), "bfloat16": ("uint16_t", "PM_BF16")}
ROWS = (1, 2, 3, 4, 5, 6, 8, 12)
REGISTERS = {Isa.GENERIC: 16, Isa.AVX2: 16, Isa.AVX512: 32, Isa.AVX512_BF16: 32, Isa.NEON: 32}
VECTORS = {
    Isa.GENERIC: (4,),
    Isa.NEON: (4,),
    Isa.AVX2: (8, 4),
    Isa.AVX512: (16, 8),
    Isa.AVX512_BF16: (16, 8),
}
_TEMPLATES = {"widen": "linear.cpp", "dot": "linear_dot.cpp", "split": "linear_split.cpp"}


@dataclass(frozen=True)
class LinearPattern:
    """One kernel. `engine`: `widen` multiplies in float32, `dot` by bfloat16 dot products, `split` shares out K too."""

    isa: Isa
    engine: str = "widen"
    storage: str = "pairs"
    panel: int = 16
    rows: int = 4
    sums: int = 4
    lanes: int = 8
    pack_x: bool = False
    widen_once: bool = False
    unroll: int = 2
    prefetch: int = 512
    grain: int = 1
    chunk: int = 64
    splits: int = 1

    def params(self) -> dict[str, str]:
        return as_text(self)

    def label(self) -> str:
        return f"{self.engine}-{self.storage}-{self.panel}x{self.rows}"


class LinearVocabulary:
    """The patterns that fit one linear layer at M in [min_m, max_m] on a machine of one tier."""

    pattern = "packed-linear"

    def __init__(self, definition: Definition, max_m: int, isa: Isa) -> None:
        self._definition = definition
        self._dtype = definition.inputs["x"].dtype
        self._max_m = max_m
        self._isa = isa
        self._choices: Mapping[str, tuple[Any, ...]] = {
            "storage": tuple(STORAGES),
            "rows": tuple(rows for rows in ROWS if rows <= max_m),
            "panel": (8, 12, 16, 24, 32, 48, 64),
            "sums": (1, 4, 8, 12),
            "pack_x": (False, True),
            "widen_once": (False, True),
            "lanes": tuple({lanes: None for tier in Isa if isa.runs(tier) for lanes in VECTORS[tier]}),
            "unroll": (1, 2, 4, 8),
            "prefetch": (512, 0, 1024, 4096),
            "engine": tuple(_TEMPLATES),
            "grain": (1, 2, 4),
            "chunk": (64, 32, 128, 256),
            "splits": (1, 2, 4),
            "isa": tuple(tier for tier in Isa if isa.runs(tier)),
        }

    def bases(self) -> Iterator[LinearPattern]:
        """Where the search starts: a rule of thumb by tier and M, for each engine that the tier has."""
        lanes = LANES[self._isa]
        wide = REGISTERS[self._isa] == 32
        few = LinearPattern(isa=self._isa, lanes=lanes, panel=3 * lanes, rows=8 if wide else 4)
        one = replace(few, panel=2 * lanes, rows=1, sums=8, prefetch=4096)
        # Many rows wait for arithmetic rather than for memory: then widening costs more than it saves.
        many = replace(few, panel=2 * lanes, rows=8 if wide else 4, storage="float32")
        thumb = (one,) if self._max_m == 1 else (few,) if self._max_m <= 8 else (many, few)
        for base in (replace(few, engine="dot"), *thumb):
            fitting = self.canonical(base)
            if fitting is not None:
                yield fitting

    def neighbours(self, pattern: LinearPattern) -> Iterator[LinearPattern]:
        """What differs in one choice, as far as it makes sense."""
        for changed in changes(pattern, self._choices):
            fitting = self.canonical(changed)
            if fitting is not None and fitting != pattern:
                yield fitting

    def parse(self, params: Mapping[str, str]) -> LinearPattern | None:
        """The pattern that `params` tell, where it is one for this layer and machine."""
        pattern = from_text(LinearPattern, params)
        return None if pattern is None else self.canonical(pattern)

    def canonical(self, pattern: LinearPattern) -> LinearPattern | None:
        """The pattern with choices that make no difference here at their defaults; None where it cannot work."""
        refitted = self._refit(pattern)
        if any(getattr(refitted, name) not in values for name, values in self._choices.items()):
            return None
        fitted = self._by_engine(refitted)
        if fitted is None or fitted.panel % fitted.lanes:
            return None
        if self._max_m <= fitted.rows or fitted.storage == "float32":
            fitted = replace(fitted, widen_once=False)
        if self._max_m <= fitted.chunk:
            fitted = replace(fitted, chunk=64)
        full = fitted.rows * (fitted.panel // fitted.lanes)
        # One register holds the broadcast value of x and one a weight; rows beyond one keep all weights of a step.
        spare = 1 if fitted.rows == 1 else 2
        fits = max(full, fitted.sums) + spare <= REGISTERS[fitted.isa]
        return fitted if fits else None

    def sources(self, pattern: LinearPattern) -> tuple[SourceFile, ...]:
        """layout.h, which alone decides the packing, and kernel.cpp."""
        element, depth = STORAGES[pattern.storage]
        given, code = GIVEN[self._dtype]
        layout = {
            "n": self._definition.axes["N"].value,
            "k": self._definition.axes["K"].value,
            "panel": pattern.panel,
            "depth": depth,
            "element": element,
            "storage": "float32" if pattern.storage == "float32" else "bfloat16",
            "given": given,
            "dtype": code,
        }
        kernel = {**pattern.params(), **layout}
        return (
            render("layout.h", "layout.h", layout),
            render(_TEMPLATES[pattern.engine], "kernel.cpp", kernel),
        )

    @property
    def layout_source(self) -> str | None:
        return "layout.h"

    def _refit(self, pattern: LinearPattern) -> LinearPattern:
        """A pattern of a wider machine or of another M, brought into this vocabulary where that is possible."""
        rows = max((rows for rows in self._choices["rows"] if rows <= pattern.rows), default=1)
        lanes = pattern.lanes if pattern.lanes in VECTORS[pattern.isa] else VECTORS[pattern.isa][0]
        return replace(pattern, rows=rows, lanes=lanes)

    def _by_engine(self, pattern: LinearPattern) -> LinearPattern | None:
        narrow = self._dtype == "bfloat16"
        if pattern.engine == "dot":
            able = narrow and pattern.isa is Isa.AVX512_BF16 and pattern.storage == "pairs"
            fixed = replace(pattern, lanes=16, pack_x=False, widen_once=False, splits=1)
            return fixed if able else None
        if pattern.engine == "split":
            fixed = replace(pattern, sums=1, pack_x=False, widen_once=False, grain=1, chunk=64)
            return None if narrow else replace(fixed, splits=max(2, pattern.splits))
        if pattern.isa is Isa.AVX512_BF16:
            # Its instructions are the dot products: without them the code is that of the tier below.
            pattern = replace(pattern, isa=Isa.AVX512)
        return replace(pattern, splits=1, pack_x=narrow or (pattern.pack_x and self._max_m > 1))
