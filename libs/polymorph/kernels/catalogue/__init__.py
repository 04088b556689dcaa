"""Kernels of our own, as Solutions: where a search begins, and what a benchmark swaps. One module an operation."""

from collections.abc import Callable

from polymorph.kernels.catalogue.activation import silu_and_mul_solutions
from polymorph.kernels.catalogue.attention import attention_solutions
from polymorph.kernels.catalogue.moe import moe_solutions
from polymorph.kernels.catalogue.norms import norm_solutions
from polymorph.kernels.catalogue.rotary import rotary_solutions
from polymorph.kernels.catalogue.sampling import sampling_solutions
from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Definition, Solution

Writer = Callable[[Definition, Isa], tuple[Solution, ...]]

WRITERS: dict[str, Writer] = {
    "moe": moe_solutions,
    "rmsnorm": norm_solutions,
    "fused_add_rmsnorm": norm_solutions,
    "silu_and_mul": silu_and_mul_solutions,
    "rotary": rotary_solutions,
    "qk_norm_rotary": rotary_solutions,
    "attn_decode": attention_solutions,
    "top_k_top_p": sampling_solutions,
}
"""By `op_type` of the definition; a writer gives the variants that suit the constant axes and the ISA, best guess first."""


def solutions(definition: Definition, isa: Isa) -> tuple[Solution, ...]:
    """Our kernels for an operation; empty where we have none."""
    writer = WRITERS.get(definition.op_type)
    return writer(definition, isa) if writer is not None else ()
