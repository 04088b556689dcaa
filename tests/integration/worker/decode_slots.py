"""Decode attention and the masking of logits as vLLM's own code does them, for operation_slots.py."""

from typing import Any

import torch

HEADS, KV_HEADS, WIDTH, BLOCK = 6, 2, 32, 32
LENGTHS = (40, 1, 97)
VOCABULARY = 83


class Cache:
    """Sequences that have cached all but their last token, which is the query's."""

    def __init__(self) -> None:
        pages = [-(-length // BLOCK) for length in LENGTHS]
        self.whole = torch.zeros(sum(pages), KV_HEADS, BLOCK, 2 * WIDTH)
        self.table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
        first = 0
        for row, count in enumerate(pages):
            self.table[row, :count] = torch.arange(first, first + count)
            first += count
        rows = range(len(LENGTHS))
        slots = [
            int(self.table[row, i // BLOCK]) * BLOCK + i % BLOCK for row in rows for i in range(LENGTHS[row])
        ]
        keys, values = torch.randn(2, len(slots), KV_HEADS, WIDTH)
        from vllm import _custom_ops as ops

        halves = self.whole.view(-1, KV_HEADS, 2 * BLOCK, WIDTH).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.tensor(slots), "vec")
        self.query = torch.randn(2 * len(LENGTHS), HEADS, WIDTH)


class Owner:
    """What vLLM's attention layer tells its backend."""

    isa = "vec"
    _k_scale_float = _v_scale_float = 1.0


def attended(cache: Cache, tokens: int) -> Any:
    """Each sequence's last `tokens` tokens over its cache, by a layer of vLLM's made now."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

    layer = object.__new__(CPUAttentionBackendImpl)
    vars(layer).update(
        num_heads=HEADS, head_size=WIDTH, scale=0.25, logits_soft_cap=0, num_kv_heads=KV_HEADS,
        alibi_slopes=None, sliding_window=-1, kv_cache_dtype="auto", attn_type="decoder", sinks=None,
        use_zentorch_sdpa=False,
    )  # fmt: skip
    rows = [row for row, length in enumerate(LENGTHS) if length >= tokens]
    starts = torch.arange(0, tokens * len(rows) + 1, tokens, dtype=torch.int32)
    lengths = torch.tensor([LENGTHS[row] for row in rows], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        len(rows), HEADS, KV_HEADS, WIDTH, lengths, torch.float32, starts, True, -1, "vec", True
    )
    count = tokens * len(rows)
    metadata = CPUAttentionMetadata(
        num_actual_tokens=count, max_query_len=tokens, query_start_loc=starts, max_seq_len=max(LENGTHS),
        seq_lens=lengths, block_table=cache.table[rows].contiguous(), slot_mapping=torch.empty(0),
        scheduler_metadata=plan,
    )  # fmt: skip
    output = torch.zeros(count, HEADS, WIDTH)
    layer.forward(Owner(), cache.query[:count], None, None, cache.whole, metadata, output)
    return output


def masked(logits: Any) -> Any:
    """Top-k and top-p as vLLM's sampler applies them."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    k = torch.tensor([VOCABULARY, 5, 1, 40], dtype=torch.int32)
    return apply_top_k_top_p(logits.clone(), k, torch.tensor([0.9, 1.0, 0.5, 0.7]))
