"""Top-k and top-p: which tokens of the vocabulary may be sampled."""

import re

from polymorph.kernels.definitions.family import Family, const
from polymorph.kernels.schema import Axis, Definition, DefinitionExtension, TensorSpec

_TOP_K_TOP_P = """\
import torch


@torch.no_grad()
def run(logits, k=None, p=None):
    # Ascending, so that a token's sum is the probability of all that are no likelier than it.
    ranked, order = logits.sort(dim=-1, stable=True)
    if k is not None:
        least = ranked.gather(1, ranked.shape[1] - k.long().unsqueeze(1))
        ranked = ranked.masked_fill(ranked < least, -float("inf"))
    if p is not None:
        total = ranked.softmax(dim=-1).cumsum(dim=-1)
        # The bound is rounded to float32 by definition: it decides beside which token the tail ends.
        bound = (1 - p.float()).to(total.dtype).unsqueeze(1)
        unlikely = total <= bound
        unlikely[:, -1] = False
        ranked = ranked.masked_fill(unlikely, -float("inf"))
    return torch.empty_like(logits).scatter_(1, order, ranked)
"""


def top_k_top_p_definition(v: int) -> Definition:
    """masked[M, V]: logits, with -inf for all but the k[m] largest, and of these for the tail whose probability is at most
    1 - p[m]. Without k or p that half is off; k = V and p = 1 leave their row as it is.

    Among equal logits at the border of the tail any may stay; the reference keeps those with the higher index. Masked may
    share the memory of logits.
    """
    rows = TensorSpec(shape=("M", "V"), dtype="float32")
    return Definition(
        name=f"top_k_top_p_v{v}_f32",
        op_type="top_k_top_p",
        axes={"M": Axis(type="var"), "V": const("V", v)},
        inputs={
            "logits": rows,
            "k": TensorSpec(shape=("M",), dtype="int32"),
            "p": TensorSpec(shape=("M",), dtype="float32"),
        },
        outputs={"masked": rows},
        reference=_TOP_K_TOP_P,
        tags=("stage:decode", "op:sampling"),
        constraints=("1 <= k[m] <= V",),
        x_polymorph=DefinitionExtension(
            accumulation="float64",
            equivalence="distributional",
            flops="4*M*V",
            bytes="4*(2*M*V + 2*M)",
            optional_inputs=("k", "p"),
            output_aliases={"masked": "logits"},
        ),
    )


TOP_K_TOP_P = Family(
    pattern=re.compile(r"top_k_top_p_v(?P<v>\d+)_f32"),
    shown="top_k_top_p_v<V>_f32",
    slot="sampling",
    make=lambda match: top_k_top_p_definition(int(match["v"])),
)
