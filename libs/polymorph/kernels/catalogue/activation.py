"""Kernels of silu_and_mul: vectors in flight, columns of a unit of work, from where threads pay, terms of the exponential."""

from dataclasses import asdict, dataclass

from polymorph.kernels.catalogue.solution import ONE_THREAD, catalogue_solution, grain_label, vector_tier
from polymorph.kernels.catalogue.template import ELEMENT, rendered
from polymorph.kernels.isa import LANES, Isa
from polymorph.kernels.schema import Definition, Solution


@dataclass(frozen=True)
class _Variant:
    unroll: int
    chunk: int
    grain: int
    short: bool = False

    def label(self) -> str:
        return f"x{self.unroll}-chunk{self.chunk}-{grain_label(self.grain)}{'-short' if self.short else ''}"


_VARIANTS = (
    _Variant(unroll=4, chunk=256, grain=8),
    _Variant(unroll=2, chunk=512, grain=ONE_THREAD),
    _Variant(unroll=4, chunk=128, grain=4),
    _Variant(unroll=2, chunk=256, grain=16),
    _Variant(unroll=4, chunk=256, grain=4, short=True),
    _Variant(unroll=2, chunk=512, grain=ONE_THREAD, short=True),
)


def silu_and_mul_solutions(definition: Definition, isa: Isa) -> tuple[Solution, ...]:
    """Best guess first."""
    tier = vector_tier(isa)
    element, code = ELEMENT[definition.inputs["x"].dtype]
    values = {"d": definition.axes["D"].value, "lanes": LANES[tier], "given": element, "dtype": code}

    def written(variant: _Variant) -> Solution:
        chosen = values | asdict(variant) | {"short": str(variant.short).lower()}
        sources = (rendered("silu_and_mul.cpp", chosen), rendered("vectors.h", chosen, "vectors.h"))
        return catalogue_solution(
            definition, variant.label(), tier, sources, pattern="vector-gate", params=asdict(variant)
        )

    return tuple(written(variant) for variant in _VARIANTS)
