"""Kernels of the rotary embedding, alone and after the heads' norm: heads of a unit of work, threads, one pass or two."""

from dataclasses import asdict, dataclass
from typing import Any

from polymorph.kernels.catalogue.solution import ONE_THREAD, catalogue_solution, grain_label, vector_tier
from polymorph.kernels.catalogue.template import ELEMENT, rendered
from polymorph.kernels.isa import LANES, Isa
from polymorph.kernels.schema import Definition, Solution

_ALL_HEADS = 1 << 20


@dataclass(frozen=True)
class _Variant:
    """`unit` heads are one unit of work; `narrow`: vectors of half the width."""

    unit: int
    grain: int
    keep: bool = False
    narrow: bool = False

    def label(self) -> str:
        unit = "token" if self.unit == _ALL_HEADS else f"heads{self.unit}"
        marks = f"{'-kept' if self.keep else ''}{'-narrow' if self.narrow else ''}"
        return f"{unit}-{grain_label(self.grain)}{marks}"


_VARIANTS = (
    _Variant(unit=_ALL_HEADS, grain=8),
    _Variant(unit=_ALL_HEADS, grain=ONE_THREAD),
    _Variant(unit=2, grain=16),
    _Variant(unit=_ALL_HEADS, grain=16, narrow=True),
    _Variant(unit=_ALL_HEADS, grain=4),
)
_NORMED = (
    *_VARIANTS,
    _Variant(unit=_ALL_HEADS, grain=8, keep=True),
    _Variant(unit=2, grain=16, keep=True),
)


def rotary_solutions(definition: Definition, isa: Isa) -> tuple[Solution, ...]:
    """Best guess first."""
    tier = vector_tier(isa)
    values = _values(definition)

    def written(variant: _Variant) -> Solution:
        lanes = LANES[tier] // 2 if variant.narrow else LANES[tier]
        unit = min(variant.unit, values["query"] + values["key"])
        own = {"lanes": lanes, "unit": unit, "grain": variant.grain, "keep": str(variant.keep).lower()}
        sources = (
            rendered("rotary.cpp", values | own),
            rendered("vectors.h", values | own, "vectors.h"),
        )
        return catalogue_solution(
            definition, variant.label(), tier, sources, pattern="vector-rotary", params=asdict(variant)
        )

    return tuple(written(variant) for variant in (_NORMED if values["norm"] == "true" else _VARIANTS))


def _values(definition: Definition) -> dict[str, Any]:
    query, key, width, rotary = (definition.axes[axis].value or 0 for axis in ("Q", "K", "D", "R"))
    element, code = ELEMENT[definition.inputs["query"].dtype]
    return {
        "query": query // width,
        "key": key // width,
        "width": width,
        "half": rotary // 2,
        "neox": str("style:neox" in definition.tags).lower(),
        "norm": str("query_weight" in definition.inputs).lower(),
        "given": element,
        "dtype": code,
    }
