"""Cases of top-k and top-p: one call a step, on logits that are copied anew for each, since they are masked in place."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from benchmarks.operations.models import Shapes
from benchmarks.operations.paired import Call, Case

from polymorph.engine.slots import Slots

_MOST_LOGITS = 1 << 21


def cases(operation: str, shapes: Shapes, tokens: Sequence[int], slots: Slots) -> Iterator[Case]:
    """By top-p alone, by both, and by top-k alone; one model for each size of vocabulary."""
    if shapes.name not in ("tiny-dense", "smollm2-135m-instruct"):
        return
    vocabulary = int(shapes.config["vocab_size"])
    slots.ops.add_top_k_top_p(vocabulary)
    for m in tokens:
        if m * vocabulary > _MOST_LOGITS:
            continue
        k, p = torch.full((m,), 50, dtype=torch.int32), torch.full((m,), 0.9)
        for label, options in (("p=0.9", (None, p)), ("k=50 p=0.9", (k, p)), ("k=50", (k, None))):
            through, stock = _calls(slots, _logits(m, vocabulary), *options)
            yield Case(
                operation, f"{shapes.name} {label}", m, f"{operation}_v{vocabulary}_f32", [through],
                without_slot=[stock], same=_same_as(stock),
            )  # fmt: skip


def _logits(m: int, vocabulary: int) -> torch.Tensor:
    """As a language model's: a few tokens stand out."""
    return torch.randn(m, vocabulary) * 3 + (torch.rand(m, vocabulary) < 20 / vocabulary) * 8


def _calls(slots: Slots, logits: torch.Tensor, k: Any, p: Any) -> tuple[Call, Call]:
    from vllm.v1.sample.ops.topk_topp_sampler import (  # noqa: PLC0415 - after the environment is set
        apply_top_k_top_p_pytorch,
    )

    from polymorph.engine.hooks.sampling import through_slot  # noqa: PLC0415

    masked, apply = torch.empty_like(logits), through_slot(slots, apply_top_k_top_p_pytorch)
    return (
        lambda: apply(masked.copy_(logits), k, p, True),
        lambda: apply_top_k_top_p_pytorch(masked.copy_(logits), k, p, True),
    )


def _same_as(stock: Call) -> Callable[[Any, Any], bool]:
    """Whether the same tokens stay as with vLLM, up to one of a row, which a rounding may decide. What is compared is
    kept apart: all calls write into the same memory.
    """
    wanted = stock().isinf()
    return lambda found, _: bool((found.isinf() != wanted).sum(1).max() <= 1)
