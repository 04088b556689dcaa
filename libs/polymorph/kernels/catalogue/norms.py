"""Kernels of rms_norm and fused_add_rms_norm: what the sums are kept in, how far loops are unrolled, from where threads pay."""

from dataclasses import asdict, dataclass

from polymorph.kernels.catalogue.solution import ONE_THREAD, catalogue_solution, grain_label, vector_tier
from polymorph.kernels.catalogue.template import ELEMENT, rendered
from polymorph.kernels.isa import LANES, Isa
from polymorph.kernels.schema import Definition, Solution, SourceFile

_TITLES = {
    False: "y = x / sqrt(mean(x^2) + eps) * weight, computed in float32; y may be x.",
    True: "h = x + residual; y = h / sqrt(mean(h^2) + eps) * weight, in float32; y may be x, and h residual.",
}


def norm_sources(
    definition: Definition, *, lanes: int, chains: int, keep: bool, grain: int
) -> tuple[SourceFile, ...]:
    """One kernel. `keep`: rows stay widened in scratch between the two passes; `grain`: rows of a thread at least."""
    element, code = ELEMENT[definition.inputs["x"].dtype]
    fused = "residual" in definition.inputs
    values = {
        "lanes": lanes,
        "chains": chains,
        "keep": str(keep).lower(),
        "grain": grain,
        "title": _TITLES[fused],
        "h": definition.axes["H"].value,
        "fused": str(fused).lower(),
        "given": element,
        "dtype": code,
    }
    return rendered("norm.cpp", values), rendered("vectors.h", values, "vectors.h")


@dataclass(frozen=True)
class _Variant:
    chains: int
    keep: bool
    grain: int

    def label(self) -> str:
        return f"{'kept' if self.keep else 'reread'}-x{self.chains}-{grain_label(self.grain)}"


_VARIANTS = (
    _Variant(chains=4, keep=False, grain=16),
    _Variant(chains=2, keep=False, grain=ONE_THREAD),
    _Variant(chains=2, keep=True, grain=4),
    _Variant(chains=4, keep=True, grain=32),
    _Variant(chains=1, keep=False, grain=8),
    _Variant(chains=1, keep=True, grain=ONE_THREAD),
    _Variant(chains=2, keep=True, grain=16),
)


def norm_solutions(definition: Definition, isa: Isa) -> tuple[Solution, ...]:
    """Best guess first."""
    rounded = "residual" in definition.inputs and definition.inputs["x"].dtype != "float32"
    # A rounded sum cannot be read again: it has to be kept.
    variants = [each for each in _VARIANTS if each.keep or not rounded]
    return tuple(_solution(definition, vector_tier(isa), variant) for variant in variants)


def _solution(definition: Definition, isa: Isa, variant: _Variant) -> Solution:
    sources = norm_sources(
        definition, lanes=LANES[isa], chains=variant.chains, keep=variant.keep, grain=variant.grain
    )
    return catalogue_solution(
        definition, variant.label(), isa, sources, pattern="vector-norm", params=asdict(variant)
    )
