"""Top-k and top-p: vLLM sorts the vocabulary on a CPU; its function stays the slot's native code, called from here."""

import functools
import time
from typing import Any

import torch

from polymorph.engine.hooks.hook import Hook, HookMissing, expect, expect_names, expect_parameters
from polymorph.engine.slots import Slots


def probe() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler as module  # noqa: PLC0415 - only an engine process has vLLM
    from vllm.v1.worker import cpu_model_runner  # noqa: PLC0415

    expect_parameters(expect(module, "apply_top_k_top_p_pytorch"), "logits", "k", "p", "allow_cpu_sync")
    # Whoever masks logits calls this one, which looks the other up in its module.
    expect_names(expect(module, "apply_top_k_top_p"), "apply_top_k_top_p_pytorch")
    if expect(module, "HAS_TRITON"):
        raise HookMissing("vLLM masks logits with Triton here")
    expect(expect(cpu_model_runner, "CPUModelRunner"), "load_model")


def install(slots: Slots) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler as module  # noqa: PLC0415
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: PLC0415

    module.apply_top_k_top_p_pytorch = through_slot(slots, module.apply_top_k_top_p_pytorch)
    _announce(slots, CPUModelRunner)


HOOK = Hook("sampling", probe, install, fuses=False)


def through_slot(slots: Slots, native: Any) -> Any:
    """The function that masks logits, by the kernel in its slot or by vLLM's own, `native`."""
    ops = slots.ops

    @functools.wraps(native)
    def apply_top_k_top_p(logits: Any, k: Any, p: Any, allow_cpu_sync: bool = False) -> Any:
        if (k is None and p is None) or not _has_definition(logits):
            return native(logits, k, p, allow_cpu_sync)
        if ops.top_k_top_p(logits, k, p):
            return logits
        began = time.monotonic_ns()
        masked = native(logits, k, p, allow_cpu_sync)
        ops.count_native_top_k_top_p(logits.shape[1], logits.shape[0], time.monotonic_ns() - began)
        return masked

    return apply_top_k_top_p


def _has_definition(logits: Any) -> bool:
    return (
        logits.dtype is torch.float32
        and logits.device.type == "cpu"
        and logits.dim() == 2
        and logits.shape[0] > 0
    )


def _announce(slots: Slots, runner_class: Any) -> None:
    """A model's definition is known once it is loaded, and not only with the first request that asks for top-k or top-p."""
    native = runner_class.load_model

    @functools.wraps(native)
    def load_model(self: Any, *arguments: Any, **named: Any) -> Any:
        loaded = native(self, *arguments, **named)
        slots.ops.add_top_k_top_p(self.model_config.get_vocab_size())
        return loaded

    runner_class.load_model = load_model
