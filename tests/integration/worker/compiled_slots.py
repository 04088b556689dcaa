"""Run by test_compiled_slots.py in a process of its own: vLLM compiled, its graph calling slots of both kinds."""

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = ("def main(", "The licence permits", '{"name": ')


def _greedy(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    options = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return [list(done.outputs[0].token_ids) for done in llm.generate(list(PROMPTS), options, use_tqdm=False)]


def _rpc(llm: Any, method: str, *arguments: Any) -> dict[str, Any]:
    answer: dict[str, Any] = llm.collective_rpc(method, args=arguments)[0]
    assert answer.get("ok", True), answer
    return answer


def main(model: str, linear: str, norm: str, result: str) -> None:
    from vllm import LLM

    from polymorph.engine.launch import EngineLaunch

    launch = EngineLaunch(model=Path(model), slots=("linear", "rms_norm"), max_model_len=256, max_num_seqs=4)
    llm = LLM(**launch.arguments())
    names = list(_rpc(llm, "slots_describe")["definitions"])
    found = {"empty": _greedy(llm)}
    bindings = [
        {
            "definition": name,
            "min_m": 1,
            "max_m": 1 << 30,
            "path": linear if name.startswith("gemm") else norm,
            "artifact": "linear" if name.startswith("gemm") else "norm",
        }
        for name in names
    ]
    _rpc(llm, "slots_prepare", bindings, 60.0)
    _rpc(llm, "slots_engage", bindings)
    _rpc(llm, "slots_read", True)
    found["tuned"] = _greedy(llm)
    counters = _rpc(llm, "slots_read")
    _rpc(llm, "slots_clear")
    found["again"] = _greedy(llm)
    Path(result).write_text(json.dumps({"names": names, "tokens": found, "counters": counters}))


if __name__ == "__main__":
    main(*sys.argv[1:])
