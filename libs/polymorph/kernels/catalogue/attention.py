"""Kernels of decode attention: how far register blocks reach, how tiles are shared among threads, what is fetched ahead."""

import math
from dataclasses import asdict, dataclass

from polymorph.kernels.catalogue.template import ELEMENT, rendered
from polymorph.kernels.isa import LANES, Isa
from polymorph.kernels.schema import BuildSpec, Definition, Solution, SolutionExtension, SourceFile

_REGISTERS = {Isa.AVX512: 32, Isa.NEON: 32}
_MOST_ROWS = 4


@dataclass(frozen=True)
class _Variant:
    """`tile`: tokens between two looks at the greatest score; `blocked`: how many vectors of sums are kept in registers;
    `stream`: pages are fetched ahead of their use; `spread`: threads share all tiles evenly, wherever a sequence ends;
    `alone`: tiles that one thread does at most.
    """

    tile: int = 128
    blocked: int = 12
    prefetch: bool = True
    stream: bool = False
    spread: bool = True
    alone: int = 4

    def label(self, isa: Isa) -> str:
        words = [isa.name.lower(), f"tile{self.tile}", f"block{self.blocked}", f"alone{self.alone}"]
        words += ["spread" if self.spread else "whole"]
        words += ["prefetch"] * self.prefetch + ["stream"] * self.stream
        return "-".join(words)


_VARIANTS = (
    _Variant(prefetch=False, stream=True),
    _Variant(),
    _Variant(tile=64),
    _Variant(stream=True, spread=False),
    _Variant(tile=32, prefetch=False, alone=16),
    _Variant(spread=False),
    _Variant(blocked=6, alone=0),
    _Variant(tile=64, blocked=6, prefetch=False, spread=False, alone=0),
)


def attention_solutions(definition: Definition, isa: Isa) -> tuple[Solution, ...]:
    """Best guess first; none where a head or a block is no multiple of 16, which no cache of vLLM's has."""
    if definition.axes["D"].value % 16 or definition.axes["block"].value % 16:  # type: ignore[operator]
        return ()
    tier = min(isa, Isa.AVX512) if isa is not Isa.NEON else isa
    made = (_solution(definition, tier, variant) for variant in _VARIANTS)
    # In small blocks some variants are the same code.
    return tuple({solution.sources: solution for solution in made}.values())


def _solution(definition: Definition, isa: Isa, variant: _Variant) -> Solution:
    return Solution(
        name=f"{definition.name}-{variant.label(isa)}",
        definition=definition.name,
        author="polymorph",
        spec=BuildSpec(target_hardware=(isa.name,)),
        sources=(
            _source(definition, isa, variant),
            rendered("exponential.h", {}, path="exponential.h"),
        ),
        x_polymorph=SolutionExtension(
            proposer="catalogue",
            pattern="online-softmax",
            params={name: str(value).lower() for name, value in asdict(variant).items()},
            isa=isa.name,
        ),
    )


def _source(definition: Definition, isa: Isa, variant: _Variant) -> SourceFile:
    heads, kv_heads, d, page = (int(definition.axes[axis].value or 0) for axis in ("Hq", "Hk", "D", "block"))
    element, code = ELEMENT[definition.inputs["q"].dtype]
    lanes, tile = LANES[isa], math.gcd(variant.tile, page)
    rows = _divisor(heads // kv_heads, _MOST_ROWS)
    # Beside the sums stand one vector of the cache and a broadcast element of each row.
    most = min(variant.blocked, _REGISTERS.get(isa, 16) - 1 - rows) // rows
    return rendered(
        "attention.cpp",
        {
            "lanes": lanes,
            "heads": heads,
            "kv_heads": kv_heads,
            "d": d,
            "page": page,
            "tile": tile,
            "rows": rows,
            "tokens": _divisor(tile // lanes, most),
            "columns": _divisor(d // lanes, most),
            "prefetch": str(variant.prefetch).lower(),
            "stream": str(variant.stream and tile == page).lower(),
            "spread": str(variant.spread).lower(),
            "alone": variant.alone,
            "element": element,
            "dtype": code,
        },
    )


def _divisor(value: int, most: int) -> int:
    """The largest divisor of `value` that is at most `most`."""
    return next(each for each in range(max(1, min(value, most)), 0, -1) if value % each == 0)
