"""One engine of a paired comparison, in a process of its own: generates when it is told to, and says how long it took."""

import json
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any, TextIO

from polymorph.engine.launch import EngineLaunch

PROMPT_TOKENS = 16


class Arm:
    """A compiled engine; kernels of the catalogue serve its slots, but for those of linear layers, where that is asked."""

    def __init__(self, model: str, slots: tuple[str, ...]) -> None:
        from vllm import LLM  # noqa: PLC0415 - after the environment is set

        launch = EngineLaunch(
            model=Path(model), slots=slots, max_model_len=512, max_num_seqs=32, enable_prefix_caching=False
        )
        self._llm = LLM(**launch.arguments())
        self._vocabulary = self._llm.get_tokenizer().vocab_size
        self._bindings: list[dict[str, Any]] | None = None

    def generate(self, batch: int, tokens: int, seed: int, *, kernels: bool) -> dict[str, Any]:
        """Seconds for `tokens` greedy tokens of each of `batch` prompts, and what the slots served."""
        from vllm import SamplingParams  # noqa: PLC0415

        self._engage(kernels=kernels)
        rng = Random(seed)
        prompts = [
            {"prompt_token_ids": [rng.randrange(self._vocabulary) for _ in range(PROMPT_TOKENS)]}
            for _ in range(batch)
        ]
        options = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        began = time.perf_counter()
        done = self._llm.generate(prompts, options, use_tqdm=False)
        seconds = time.perf_counter() - began
        counters = self._rpc("slots_read", True)
        served = sum(each["served"]["calls"] for each in counters["artifacts"].values())
        return {
            "seconds": seconds,
            "served": served,
            "tokens": [list(each.outputs[0].token_ids) for each in done],
        }

    def _engage(self, *, kernels: bool) -> None:
        if kernels and self._bindings is None:
            self._bindings = _bindings(self._rpc("slots_describe")["definitions"])
        self._rpc("slots_engage", self._bindings if kernels else [])

    def _rpc(self, method: str, *arguments: Any) -> Any:
        answer = self._llm.collective_rpc(method, args=arguments)[0]
        if not answer.get("ok", True):
            raise RuntimeError(f"{method}: {answer['reason']}")
        return answer


def _bindings(definitions: dict[str, int]) -> list[dict[str, Any]]:
    from polymorph.kernels.catalogue.artifacts import artifacts  # noqa: PLC0415
    from polymorph.kernels.definitions import definition_named  # noqa: PLC0415

    names = [name for name in definitions if not name.startswith("gemm_")]
    return [artifact.binding() for name in names for artifact in artifacts(definition_named(name), most=1)]


def main(model: str, slots: str) -> None:
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    arm = Arm(model, tuple(slots.split(",")))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(arm.generate(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
