"""Kernels of top-k and top-p: what is kept between passes, when what is left is gathered, how many sums run beside each
other.
"""

from dataclasses import asdict, dataclass

from polymorph.kernels.catalogue.template import rendered
from polymorph.kernels.isa import LANES, Isa
from polymorph.kernels.schema import BuildSpec, Definition, Solution, SolutionExtension


@dataclass(frozen=True)
class _Variant:
    """`keep`: exponentials stay in scratch; `gather`: passes between two copies of what is left, 0 for none."""

    keep: bool = True
    gather: int = 3
    chains: int = 2
    grain: int = 1

    def label(self, isa: Isa) -> str:
        words = [isa.name.lower(), "kept" if self.keep else "computed", f"x{self.chains}"]
        words.append(f"gather{self.gather}" if self.gather else "whole")
        return "-".join([*words, f"grain{self.grain}"] if self.grain > 1 else words)


_VARIANTS = (
    _Variant(),
    _Variant(keep=False),
    _Variant(gather=6),
    _Variant(gather=1, chains=4),
    _Variant(keep=False, gather=2, chains=4),
    _Variant(gather=0, chains=4),
    _Variant(keep=False, gather=0, chains=1, grain=2),
)


def sampling_solutions(definition: Definition, isa: Isa) -> tuple[Solution, ...]:
    """Best guess first."""
    tier = min(isa, Isa.AVX512) if isa is not Isa.NEON else isa
    return tuple(_solution(definition, tier, variant) for variant in _VARIANTS)


def _solution(definition: Definition, isa: Isa, variant: _Variant) -> Solution:
    values = {
        "lanes": LANES[isa],
        "v": definition.axes["V"].value,
        "chains": variant.chains,
        "keep": str(variant.keep).lower(),
        "gather": variant.gather,
        "grain": variant.grain,
    }
    return Solution(
        name=f"{definition.name}-{variant.label(isa)}",
        definition=definition.name,
        author="polymorph",
        spec=BuildSpec(target_hardware=(isa.name,)),
        sources=(rendered("sampling.cpp", values), rendered("exponential.h", {}, path="exponential.h")),
        x_polymorph=SolutionExtension(
            proposer="catalogue",
            pattern="halved-interval",
            params={name: str(value).lower() for name, value in asdict(variant).items()},
            isa=isa.name,
        ),
    )
