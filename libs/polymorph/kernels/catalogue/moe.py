"""Kernels for the experts of a mixture-of-experts layer: how weights are stored, how pairs are blocked and divided."""

from dataclasses import asdict, dataclass

from polymorph.kernels.catalogue.template import ELEMENT, rendered
from polymorph.kernels.isa import LANES, Isa
from polymorph.kernels.schema import BuildSpec, Definition, Solution, SolutionExtension

_DEPTH = {"pairs": 2, "halves": 1, "float32": 1}


@dataclass(frozen=True)
class MoePattern:
    """What makes one kernel another; moe.cpp and moe_layout.h say what each value does.

    `pairs` and `halves` hold weights as bfloat16, two values of a row side by side or one: half the memory to read, each
    widened exactly, and weights that are no bfloat16 values are refused. `float32` holds all.
    """

    storage: str
    vectors: int
    rows: int
    sums: int
    prefetch: int
    widen_from: int = 0
    by_cost: bool = False


PATTERNS = {
    "stream": MoePattern("pairs", vectors=1, rows=2, sums=8, prefetch=2048),
    "wide": MoePattern("halves", vectors=2, rows=3, sums=8, prefetch=1024),
    "busiest": MoePattern("pairs", vectors=1, rows=6, sums=8, prefetch=1024, widen_from=12),
    "grouped": MoePattern("pairs", vectors=1, rows=6, sums=8, prefetch=1024, by_cost=True),
    "exact": MoePattern("float32", vectors=1, rows=6, sums=8, prefetch=1024),
}


def moe_solutions(definition: Definition, isa: Isa) -> tuple[Solution, ...]:
    """Best guess first."""
    tier = min(isa, Isa.AVX512) if isa is not Isa.NEON else isa
    return tuple(moe_solution(definition, tier, name, pattern) for name, pattern in PATTERNS.items())


def moe_solution(definition: Definition, isa: Isa, name: str, pattern: MoePattern) -> Solution:
    """One kernel."""
    values = _values(definition, isa, pattern)
    return Solution(
        name=f"{definition.name}-{isa.name.lower()}-{name}",
        definition=definition.name,
        author="polymorph",
        spec=BuildSpec(target_hardware=(isa.name,)),
        sources=(rendered("moe.cpp", values), rendered("moe_layout.h", values, "layout.h")),
        x_polymorph=SolutionExtension(
            proposer="catalogue",
            pattern="grouped-experts",
            params={key: str(value).lower() for key, value in asdict(pattern).items()},
            isa=isa.name,
            layout_source="layout.h",
        ),
    )


def _values(definition: Definition, isa: Isa, pattern: MoePattern) -> dict[str, object]:
    given, code = ELEMENT[definition.inputs["x"].dtype]
    constants = {axis: definition.axes[axis].value for axis in ("E", "K", "H", "I")}
    return {
        **asdict(pattern),
        "by_cost": str(pattern.by_cost).lower(),
        "experts": constants["E"],
        "topk": constants["K"],
        "hidden": constants["H"],
        "intermediate": constants["I"],
        "lanes": LANES[isa],
        "depth": _DEPTH[pattern.storage],
        "element": "float" if pattern.storage == "float32" else "uint16_t",
        "given": given,
        "code": code,
    }
