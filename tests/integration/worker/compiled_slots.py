"""Run by test_compiled_slots.py in a process of its own: vLLM compiled, its graph calling every slot that there is."""

import json
import sys
from pathlib import Path
from typing import Any

from polymorph.engine.hooks import HOOKS
from polymorph.engine.launch import EngineLaunch

_COLUMNS = 16  # the tests' kernel of a linear layer computes so many at once
PROMPTS = ("def main(", "The licence permits", '{"name": ')


def launch_of(model: str) -> EngineLaunch:
    """An engine with all slots, those too that are off by default."""
    return EngineLaunch(model=Path(model), slots=tuple(HOOKS), max_model_len=256, max_num_seqs=4)


def _tokens(llm: Any) -> list[list[int]]:
    """Greedy ones, and one more that is sampled from the likeliest by a seed."""
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    sampled = SamplingParams(max_tokens=12, top_p=0.9, top_k=40, seed=5, ignore_eos=True)
    options = [*([greedy] * len(PROMPTS)), sampled]
    asked = llm.generate([*PROMPTS, PROMPTS[0]], options, use_tqdm=False)
    return [list(done.outputs[0].token_ids) for done in asked]


def _rpc(llm: Any, method: str, *arguments: Any) -> dict[str, Any]:
    answer: dict[str, Any] = llm.collective_rpc(method, args=arguments)[0]
    assert answer.get("ok", True), answer
    return answer


def _binding(name: str, linear: str) -> dict[str, Any] | None:
    """The catalogue's first kernel for a definition; for a linear layer, where it has none, that of the tests. None for a
    layer that is too narrow for it: the gate that chooses experts.
    """
    from polymorph.kernels.catalogue.artifacts import artifacts
    from polymorph.kernels.definitions import definition_named

    made = artifacts(definition_named(name), most=1)
    if made:
        return made[0].binding()
    assert name.startswith("gemm_"), f"the catalogue has no kernel for {name}"
    if (definition_named(name).axes["N"].value or 0) % _COLUMNS:
        return None
    return {"definition": name, "min_m": 1, "max_m": 1 << 30, "path": linear, "artifact": f"test-{name}"}


def main(model: str, linear: str, result: str) -> None:
    from vllm import LLM

    llm = LLM(**launch_of(model).arguments())
    found = {"empty": _tokens(llm)}
    described = _rpc(llm, "slots_describe")
    kernels = (_binding(name, linear) for name in described["definitions"])
    bindings = [binding for binding in kernels if binding is not None]
    _rpc(llm, "slots_prepare", bindings, 60.0)
    _rpc(llm, "slots_engage", bindings)
    _rpc(llm, "slots_read", True)
    found["tuned"] = _tokens(llm)
    counters = _rpc(llm, "slots_read")
    _rpc(llm, "slots_clear")
    found["again"] = _tokens(llm)
    told = {
        "missing": described["missing"],
        "tokens": found,
        "counters": counters,
        "artifacts": {binding["definition"]: binding["artifact"] for binding in bindings},
    }
    Path(result).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
