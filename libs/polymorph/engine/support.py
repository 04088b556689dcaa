"""What an engine was started with that slots stand beside: supported, or refused by name with the reason.

Read from vLLM's configuration alone (0.31 and 0.32), so that a worker's front can tell before anything is loaded.
docs/compatibility.md holds the same table for people.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What becomes of kernels where the feature is in use."""

    SUPPORTED = "supported"  # tried: slots are engaged, and outputs are as they should be
    NATIVE = "native"  # the feature's own layers run vLLM's code alone; all other slots are engaged
    REFUSED = "refused"  # no kernel is loaded into such an engine


@dataclass(frozen=True)
class Feature:
    """One feature that an engine has in use."""

    name: str
    verdict: Verdict
    reason: str

    def told(self) -> str:
        return f"{self.verdict}: {self.reason}"


def features(config: Any) -> tuple[Feature, ...]:
    """Those in use by an engine of this `vllm_config`."""
    found = (_quantised(config), _lora(config), _multimodal(config), _disaggregated(config), _pooling(config))
    return tuple(feature for feature in found if feature is not None)


def refused(used: tuple[Feature, ...]) -> Feature | None:
    """The first feature for which no kernel is loaded at all."""
    return next((feature for feature in used if feature.verdict is Verdict.REFUSED), None)


def _quantised(config: Any) -> Feature | None:
    method = config.model_config.quantization
    if method is None:
        return None
    reason = (
        f"layers quantised by {method} get no slot: FP8, FP4, INT8 and INT4 weights have layouts and scales that no "
        f"definition of ours names; layers that it leaves unquantised, and all other operations, have theirs"
    )
    return Feature("quantised linear", Verdict.NATIVE, reason)


def _lora(config: Any) -> Feature | None:
    if config.lora_config is None:
        return None
    if config.model_config.is_moe:
        reason = (
            "adapters of experts take the place of the experts' own call, where a slot would be; not tried"
        )
        return Feature("LoRA", Verdict.REFUSED, reason)
    reason = "a slot computes the layer's own product, to which vLLM's code adds the adapters'"
    return Feature("LoRA", Verdict.SUPPORTED, reason)


def _multimodal(config: Any) -> Feature | None:
    if not config.model_config.is_multimodal_model:
        return None
    reason = (
        "layers of the encoders would share slots with those of the language model, at numbers of rows that no traffic "
        "tells; not tried with any model"
    )
    return Feature("multimodal", Verdict.REFUSED, reason)


def _disaggregated(config: Any) -> Feature | None:
    transfer = config.kv_transfer_config or config.ec_transfer_config
    if transfer is None:
        return None
    name = getattr(transfer, "kv_connector", None) or getattr(transfer, "ec_connector", None)
    reason = (
        f"by {name} requests read cache that another worker wrote, whose kernels change at another time: a lossy "
        f"revision would mix with the one before"
    )
    return Feature("disaggregated prefill", Verdict.REFUSED, reason)


def _pooling(config: Any) -> Feature | None:
    if config.model_config.runner_type != "pooling":
        return None
    reason = "kernels are tried and read back by generating tokens, which a pooling model does not"
    return Feature("pooling", Verdict.REFUSED, reason)
