"""Decode attention over the paged cache: one query token of each sequence against all that its sequence has cached."""

import re

from polymorph.kernels.definitions.family import (
    DTYPE_PATTERN,
    SHORT,
    Dtype,
    Family,
    const,
    dtype_of,
    item_bytes,
)
from polymorph.kernels.schema import Axis, Definition, DefinitionExtension, TensorSpec

LONGEST_CONTEXT = "longest context: the largest of seq_lens"

_ATTENTION = """\
import torch


@torch.no_grad()
def run(q, key_cache, value_cache, block_table, seq_lens, scale):
    wide = torch.promote_types(q.dtype, torch.float32)
    kv_heads, block = value_cache.shape[1:3]
    o = torch.zeros_like(q)
    for row, length in enumerate(seq_lens.long().tolist()):
        pages = block_table[row, : -(-length // block)].long()
        # Inside a block keys lie with the tokens side by side, values with the head's elements side by side.
        keys = key_cache[pages].to(wide).permute(1, 2, 0, 3).flatten(2)[:, :, :length]
        values = value_cache[pages].to(wide).transpose(0, 1).flatten(1, 2)[:, :length]
        queries = q[row].to(wide).unflatten(0, (kv_heads, -1))
        shares = torch.softmax(queries @ keys * float(scale), dim=-1)
        o[row] = (shares @ values).flatten(0, 1).to(q.dtype)
    return o
"""


def attn_decode_definition(heads: int, kv_heads: int, d: int, block: int, dtype: Dtype) -> Definition:
    """o[M, Hq, D] = softmax(q K^T scale) V, each of M sequences over the first seq_lens of its cached tokens.

    The cache lies as vLLM's ISA `vec` and `vec16` have it on a CPU: a block holds its keys as [D, block] and its values as
    [block, D]. Flops and bytes count every block of the table as full.

    Raises:
        ValueError: query heads that KV heads cannot share evenly.
    """
    size = item_bytes(dtype)
    if heads % kv_heads != 0:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads: a multiple is needed")
    row = TensorSpec(shape=("M", "Hq", "D"), dtype=dtype)
    return Definition(
        name=f"attn_decode_q{heads}_kv{kv_heads}_d{d}_b{block}_{SHORT[dtype]}",
        op_type="attn_decode",
        axes={
            "M": Axis(type="var"),
            "Hq": const("Hq", heads),
            "Hk": const("Hk", kv_heads),
            "D": const("D", d),
            "block": const("block", block),
            "N": Axis(type="var"),
            "P": Axis(type="var"),
        },
        inputs={
            "q": row,
            "key_cache": TensorSpec(shape=("N", "Hk", "D", "block"), dtype=dtype),
            "value_cache": TensorSpec(shape=("N", "Hk", "block", "D"), dtype=dtype),
            "block_table": TensorSpec(shape=("M", "P"), dtype="int32"),
            "seq_lens": TensorSpec(shape=("M",), dtype="int32"),
            "scale": TensorSpec(shape=None, dtype="float32"),
        },
        outputs={"o": row},
        reference=_ATTENTION,
        tags=("stage:decode", "op:attention"),
        constraints=(
            "seq_lens[m] <= P * block",
            "0 <= block_table[m, p] < N where p * block < seq_lens[m]",
        ),
        x_polymorph=DefinitionExtension(
            flops="4*M*Hq*D*P*block",
            bytes=f"{size}*(2*M*Hk*D*P*block + 2*M*Hq*D) + 4*(M*P + M)",
            feature=LONGEST_CONTEXT,
        ),
    )


def _named(match: re.Match[str]) -> Definition:
    heads, kv_heads, d, block = (int(match[axis]) for axis in ("q", "kv", "d", "block"))
    return attn_decode_definition(heads, kv_heads, d, block, dtype_of(match))


ATTN_DECODE = Family(
    pattern=re.compile(rf"attn_decode_q(?P<q>\d+)_kv(?P<kv>\d+)_d(?P<d>\d+)_b(?P<block>\d+)_{DTYPE_PATTERN}"),
    shown="attn_decode_q<Hq>_kv<Hk>_d<D>_b<block>_<dtype>",
    slot="attention",
    make=_named,
)
