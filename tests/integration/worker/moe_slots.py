"""Run by test_moe_engine.py in a process of its own: vLLM, uncompiled, with the experts of the small model in slots."""

import json
import sys
from pathlib import Path
from typing import Any

from polymorph.engine.launch import EngineLaunch

PROMPTS = ("def main(", "The licence permits", '{"name": ')


def launch_of(model: str) -> EngineLaunch:
    return EngineLaunch(model=Path(model), max_model_len=256, max_num_seqs=4, enforce_eager=True)


def _greedy(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    options = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return [list(done.outputs[0].token_ids) for done in llm.generate(list(PROMPTS), options, use_tqdm=False)]


def _rpc(llm: Any, method: str, *arguments: Any) -> dict[str, Any]:
    answer: dict[str, Any] = llm.collective_rpc(method, args=arguments)[0]
    assert answer.get("ok", True), answer
    return answer


def main(model: str, result: str) -> None:
    from vllm import LLM

    from polymorph.kernels.catalogue.artifacts import artifacts
    from polymorph.kernels.definitions import definition_named

    llm = LLM(**launch_of(model).arguments())
    llm.collective_rpc("slots_read", args=(True,))
    found = {"empty": _greedy(llm)}
    counted = _rpc(llm, "slots_read", True)
    described = _rpc(llm, "slots_describe")
    (definition,) = (name for name in described["definitions"] if name.startswith("moe_"))
    few, many = artifacts(definition_named(definition), most=2)
    bindings = [few.binding(most=80), many.binding(least=81)]
    _rpc(llm, "slots_prepare", bindings, 60.0)
    _rpc(llm, "slots_engage", bindings)
    found["tuned"] = _greedy(llm)
    tuned = _rpc(llm, "slots_read", True)
    llm.collective_rpc("reload_weights")
    engaged_after = _rpc(llm, "slots_describe")["engaged"]
    _rpc(llm, "slots_engage", bindings)
    found["reloaded"] = _greedy(llm)
    _rpc(llm, "slots_clear")
    found["again"] = _greedy(llm)
    told = {
        "definition": definition,
        "described": described,
        "tokens": found,
        "empty": counted,
        "tuned": tuned,
        "artifacts": [few.digest, many.digest],
        "engaged_after_reload": engaged_after,
    }
    Path(result).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
