"""How a kernel of the catalogue becomes a Solution."""

from collections.abc import Mapping

from polymorph.events.values import Numerics
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import BuildSpec, Definition, Solution, SolutionExtension, SourceFile

ONE_THREAD = 1 << 30
"""A grain that no call reaches: one thread does all."""


def vector_tier(isa: Isa) -> Isa:
    """The tier whose vectors code without dot products uses."""
    return isa if isa is Isa.NEON else min(isa, Isa.AVX512)


def grain_label(grain: int) -> str:
    return "one-thread" if grain == ONE_THREAD else f"grain{grain}"


def catalogue_solution(
    definition: Definition,
    label: str,
    isa: Isa,
    sources: tuple[SourceFile, ...],
    *,
    pattern: str,
    params: Mapping[str, object],
    layout_source: str | None = None,
    numerics: Numerics = Numerics.REORDERED,
) -> Solution:
    """`label` tells a variant from the others of its definition."""
    return Solution(
        name=f"{definition.name}-{isa.name.lower()}-{label}",
        definition=definition.name,
        author="polymorph",
        spec=BuildSpec(target_hardware=(isa.name,)),
        sources=sources,
        x_polymorph=SolutionExtension(
            proposer="catalogue",
            pattern=pattern,
            params={name: str(value).lower() for name, value in params.items()},
            isa=isa.name,
            layout_source=layout_source,
            numerics=numerics,
        ),
    )
