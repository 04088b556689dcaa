"""The evaluator's own engine, in a process of its own: steps when it is told to, and holds no clock and no verdict."""

import contextlib
import json
import socket
import sys
from typing import Any

from polymorph.sandbox import wire


class EngineProcess:
    """vLLM with our slots, one step at a time."""

    def __init__(self, sock: socket.socket, arguments: dict[str, Any]) -> None:
        from vllm import LLM  # noqa: PLC0415 - the environment must stand before vLLM is imported

        self._sock = sock
        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._tokens: dict[str, list[int]] = {}

    def serve(self) -> None:
        wire.send(self._sock, {"ok": True})
        with contextlib.suppress(wire.Closed):
            while True:
                message, _ = wire.receive(self._sock)
                try:
                    answer = {"ok": True, **getattr(self, f"on_{message.pop('do')}")(**message)}
                except (RuntimeError, ValueError, TypeError, KeyError) as error:
                    answer = {"ok": False, "reason": f"{type(error).__name__}: {error}"[:500]}
                wire.send(self._sock, answer)

    def on_tokenize(self, texts: list[str]) -> dict[str, Any]:
        tokenizer = self._llm.get_tokenizer()
        return {"tokens": [list(map(int, tokenizer.encode(text))) for text in texts]}

    def on_rpc(self, method: str, arguments: list[Any], named: dict[str, Any]) -> dict[str, Any]:
        """A call of the worker extension, between two steps."""
        return {"result": self._llm.collective_rpc(method, args=tuple(arguments), kwargs=named)[0]}

    def on_add(self, prompts: list[list[int]], max_tokens: int, prefix: str) -> dict[str, Any]:
        from vllm import SamplingParams  # noqa: PLC0415

        for index, prompt in enumerate(prompts):
            name = f"{prefix}{index}"
            self._tokens[name] = []
            parameters = SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
            self._engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        return {}

    def on_step(self, count: int) -> dict[str, Any]:
        """Runs `count` steps; tells how many sequences are past their prompt."""
        for _ in range(count):
            for output in self._engine.step():
                self._tokens[output.request_id] = list(map(int, output.outputs[0].token_ids))
        decoding = sum(1 for tokens in self._tokens.values() if tokens)
        return {"decoding": decoding, "tokens": sum(map(len, self._tokens.values()))}

    def on_finish(self, run: bool) -> dict[str, Any]:
        """Runs to the end, or aborts; gives every output in the order in which requests were added."""
        if run:
            while self._engine.has_unfinished_requests():
                self.on_step(1)
        else:
            self._engine.abort_request(list(self._tokens))
            while self._engine.has_unfinished_requests():
                self.on_step(1)
        outputs, self._tokens = list(self._tokens.values()), {}
        return {"outputs": outputs}


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    EngineProcess(sock, json.loads(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
