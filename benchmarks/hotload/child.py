"""One vLLM engine in a process of its own, told what to do line by line. Run by measures.py."""

import json
import sys
import time
from pathlib import Path
from typing import Any


def _run(llm: Any, chats: int, tokens: int) -> dict[str, float]:
    from vllm import SamplingParams  # noqa: PLC0415

    options = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + number, 9, 11, 30 + number]} for number in range(chats)]
    began = time.perf_counter()
    llm.generate(prompts, options, use_tqdm=False)
    return {"seconds": time.perf_counter() - began}


def main(model: str, slots: str) -> None:
    from vllm import LLM  # noqa: PLC0415

    from polymorph.engine.launch import EngineLaunch  # noqa: PLC0415

    names = tuple(name for name in slots.split(",") if name)
    launch = EngineLaunch(model=Path(model), slots=names, max_model_len=1024, max_num_seqs=8)
    llm = LLM(**launch.arguments())
    _run(llm, 8, 8)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "method" in order:
            answer = llm.collective_rpc(order["method"], kwargs=order["keywords"])[0]
        else:
            answer = _run(llm, order["chats"], order["tokens"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
