"""Run by test_two_ranks.py in a process of its own: one engine on two CPU ranks, its kernels changed while it serves."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


async def _stream(llm: Any, request_id: str, tokens: int) -> list[int]:
    from vllm import SamplingParams

    options = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    found: list[int] = []
    async for output in llm.generate("def main(", options, request_id=request_id):
        found = list(output.outputs[0].token_ids)
    return found


async def _refused(engine: Any, bindings: Any) -> str:
    from polymorph.engine.loading.admission import Refused

    try:
        await engine.engage(bindings)
    except Refused as refusal:
        return str(refusal)
    return ""


async def _run(model: str, library: str, lame: str, found: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    from polymorph.engine.bindings import SlotBinding
    from polymorph.engine.launch import EngineLaunch
    from polymorph.worker.adapters.engine import Engine

    launch = EngineLaunch(model=Path(model), max_model_len=256, max_num_seqs=4, enforce_eager=True)
    arguments = AsyncEngineArgs(**launch.arguments(), tensor_parallel_size=2, disable_log_stats=True)
    llm = AsyncLLM.from_engine_args(arguments)
    try:
        engine = Engine(llm, arguments, slotted=True, dead=EngineDeadError)
        definitions = [name for name in await engine.definitions() if name.startswith("gemm")]
        bindings = [SlotBinding(name, 1, 1 << 30, library, "both-ranks") for name in definitions]
        found["native"] = await _stream(llm, "native", 24)
        running = asyncio.create_task(_stream(llm, "swapped", 96))
        for wanted in (bindings, [], bindings):
            await engine.engage(wanted)
            await asyncio.sleep(0.05)
        found["running"] = not running.done()
        found["swapped"] = await running
        found["served"] = [
            each["artifacts"]["both-ranks"]["served"]["calls"] for each in await engine._all("slots_read")
        ]
        found["refusal"] = await _refused(
            engine, [SlotBinding(b.definition, 1, 1 << 30, lame, "lame") for b in bindings]
        )
        found["engaged"] = [each["engaged"] for each in await engine._all("slots_describe")]
        found["after"] = await _stream(llm, "after", 24)
    finally:
        llm.shutdown()


def main(model: str, library: str, lame: str, result: str) -> None:
    found: dict[str, Any] = {}
    asyncio.run(_run(model, library, lame, found))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
