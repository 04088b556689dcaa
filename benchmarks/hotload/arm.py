"""What runs in a process of its own: one vLLM engine that is told what to do, or the timing of one operator.

Forked from a server that has imported vLLM, with the environment of an engine within its caller's process.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from polymorph.engine.launch import EngineLaunch

# What an engine's process would import for seconds, each anew. The server does it once.
PRELOADED = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.registry",
]
_CALLS = 200


def engine(pipe: Connection, launch: EngineLaunch) -> None:
    """Serves orders until the other end closes; its first answer says that it is warm."""
    os.environ["POLYMORPH_SLOTS"] = ",".join(launch.live_slots)
    from vllm import LLM  # noqa: PLC0415 - the environment must stand before vLLM is imported

    llm = LLM(**launch.arguments())
    for chats in (1, launch.max_num_seqs):
        _generate(llm, chats, 8)
    pipe.send({"ready": True})
    with contextlib.suppress(EOFError):
        while True:
            order = pipe.recv()
            if "method" in order:
                pipe.send(llm.collective_rpc(order["method"], kwargs=order["keywords"])[0])
            else:
                pipe.send(_generate(llm, order["chats"], order["tokens"]))


def _generate(llm: Any, chats: int, tokens: int) -> dict[str, float]:
    from vllm import SamplingParams  # noqa: PLC0415

    options = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [5 + number, 9, 11, 30 + number]} for number in range(chats)]
    began = time.perf_counter()
    llm.generate(prompts, options, use_tqdm=False)
    return {"seconds": time.perf_counter() - began}


def call(pipe: Connection, rounds: int) -> None:
    """Answers once with what vLLM's own operator takes for a small layer, and what an empty slot adds.

    On one thread, so that what is timed is how a call is dispatched, and in inference mode, as vLLM calls it: outside of it
    both would pass through autograd. Microseconds, medians over paired rounds.
    """
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    with torch.inference_mode():
        bare, slotted = _calls()
        for each in (bare, slotted):
            _call_us(each)
        pairs = [_pair_us(bare, slotted, turned=bool(number % 2)) for number in range(rounds)]
    pipe.send(
        {
            "bare_us": statistics.median(one for one, _ in pairs),
            "slot_us": statistics.median(two - one for one, two in pairs),
        }
    )


def _calls() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A small layer by vLLM's operator with the tensor for its result, and by an empty slot."""
    import torch  # noqa: PLC0415
    from vllm import _custom_ops  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    from polymorph.engine.dispatcher.ops import load  # noqa: PLC0415

    current_platform.import_kernels()
    ops, n, k = load(), 32, 32
    weight, x = torch.randn(n, k), torch.randn(1, k)
    handler = _custom_ops.create_onednn_mm(weight.t(), n)
    layer = ops.add_linear(f"gemm_n{n}_k{k}_f32", n, k, 0, handler.handler_tensor)
    native = torch.ops._C.onednn_mm  # noqa: SLF001 - the namespace of vLLM's operators

    def bare() -> Any:
        y = torch.empty(1, n)
        native(y, x, None, handler.handler_tensor)
        return y

    def slotted() -> Any:
        return ops.linear(x, None, layer, n)

    return bare, slotted


def _pair_us(one: Callable[[], Any], other: Callable[[], Any], *, turned: bool) -> tuple[float, float]:
    if turned:
        second = _call_us(other)
        return _call_us(one), second
    return _call_us(one), _call_us(other)


def _call_us(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for _ in range(_CALLS):
        function()
    return (time.perf_counter() - began) / _CALLS * 1e6


def launch_of(model: Path, slots: tuple[str, ...]) -> EngineLaunch:
    """Both arms are launched alike but for their slots."""
    return EngineLaunch(model=model, slots=slots, max_model_len=1024, max_num_seqs=8)
