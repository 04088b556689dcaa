"""The weights that vLLM drops after packing them for its own kernels, kept so that ours can pack them later."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class KeptWeight:
    """One weight, [N, K]. A float32 weight that is exactly representable is held as bfloat16, at half the memory."""

    tensor: Any
    dtype: Any
    key: int

    def restore(self) -> Any:
        """The weight as the model had it, value for value."""
        return self.tensor.to(self.dtype)


class WeightStore:
    """Keeps weights within a budget of bytes; a weight that the model still holds costs nothing."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self.bytes = 0
        self.refused = 0
        self._shared: dict[int, KeptWeight] = {}

    def keep(self, weight: Any, *, held_by_model: bool) -> KeptWeight | None:
        """None where the budget is spent. Layers that share a weight (tied embeddings) share what is kept.

        `weight` must not be freed by its owner before this returns.
        """
        if held_by_model:
            shared = self._shared.get(weight.data_ptr())
            kept = shared or KeptWeight(weight, weight.dtype, weight.data_ptr())
            self._shared[weight.data_ptr()] = kept
            return kept
        compact = _compact(weight)
        size = compact.numel() * compact.element_size()
        if self.bytes + size > self._budget:
            self.refused += 1
            return None
        self.bytes += size
        return KeptWeight(compact, weight.dtype, compact.data_ptr())

    def forget(self, kept: KeptWeight) -> None:
        """The layer has been loaded anew."""
        if self._shared.pop(kept.key, None) is None:
            self.bytes -= kept.tensor.numel() * kept.tensor.element_size()


def _compact(weight: Any) -> Any:
    if weight.dtype == torch.float32:
        half = weight.to(torch.bfloat16)
        if torch.equal(half.to(torch.float32), weight):
            return half
    # The storage is the model's own: vLLM only drops its reference to it.
    return weight
