"""The slots of a running AsyncLLM, called over all its ranks."""

import asyncio
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from polymorph.bus.errors import Retryable
from polymorph.engine.bindings import SlotBinding
from polymorph.engine.loading.admission import Refused
from polymorph.engine.loading.answering import answered
from polymorph.engine.loading.counters import NOTHING, Counters
from polymorph.engine.loading.rows import SELF_PREFIX
from polymorph.engine.support import Feature, features

_RPC_TIMEOUT_S = 60.0
_SLICE_S = 0.004
_REST_S = 0.05
_TOP_K, _TOP_P = 100, 0.9


@dataclass(frozen=True)
class Engaged:
    """`seconds` are how long the engine stood still for a change of its slots, `counted` what it had counted before."""

    seconds: float
    counted: Counters


class SlottedEngine:
    """Calls of the slots run between two steps and never raise for a refusal by the engine: `Refused`."""

    def __init__(self, llm: Any, *, slotted: bool, dead: type[Exception]) -> None:
        self.llm = llm
        self.slotted = slotted
        self._requests = 0
        self._dead = dead
        self._ranks = 0
        """As many answered last."""
        self.known: tuple[str, ...] = ()
        """Definitions that had a slot when they were read last: none goes, some come with their first call."""

    @property
    def alive(self) -> bool:
        return not self.llm.errored

    @property
    def max_model_len(self) -> int:
        return int(self.llm.model_config.max_model_len)

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """What it has in use beside slots, and whether that goes with kernels of ours."""
        return features(self.llm.vllm_config)

    def most_seqs(self) -> int:
        """How many requests run at the same time."""
        return int(self.llm.vllm_config.scheduler_config.max_num_seqs)

    async def definitions(self) -> tuple[str, ...]:
        if not self.slotted:
            return ()
        self.known = tuple((await self._call("slots_describe"))["definitions"])
        return self.known

    async def missing(self) -> dict[str, str]:
        """Slots that were asked for and are off, with the reason."""
        if not self.slotted:
            return {}
        return dict((await self._call("slots_describe"))["missing"])

    async def counters(self) -> Counters:
        if not self.slotted:
            return NOTHING
        return Counters.of(await self._call("slots_read"))

    async def describe(self) -> list[dict[str, Any]]:
        """What each rank says of its slots."""
        return await self._all("slots_describe")

    async def read(self) -> list[dict[str, Any]]:
        """What each rank counted."""
        return await self._all("slots_read")

    async def engage(self, bindings: Iterable[SlotBinding], *, keep_packed: bool = False) -> Engaged:
        """Makes `bindings` all that the slots run.

        Weights are packed a little at a time, so that no step waits for long. One rank does the rest in one call, since
        each costs the step that it meets; several stage first, and change where all of them could.

        Raises:
            Refused: the engine cannot run them; what ran goes on.
        """
        documents = [vars(binding) for binding in bindings]
        if not self.slotted:
            if documents:
                raise Refused("this engine was started without slots")
            return Engaged(0.0, NOTHING)
        if self._ranks == 1:
            answer, stood = await self._ready("slots_engage", documents, keep_packed=keep_packed)
            return Engaged(stood, Counters.of(answer["counted"]))
        _, stood = await self._ready("slots_stage", documents)
        flipped = await self._all("slots_flip", keep_packed=keep_packed)
        ranks = len(flipped) // self._engines
        for first in range(0, len(flipped), ranks):
            _raise_for_parted(flipped[first : first + ranks])
        stood += max(float(answer["seconds"]) for answer in flipped)
        return Engaged(stood, Counters.of(flipped[0]["counted"]))

    async def _ready(
        self, method: str, documents: list[dict[str, Any]], **more: Any
    ) -> tuple[dict[str, Any], float]:
        """All ranks make the table ready, a little at a time, or none has it; the last answer, and the seconds that they
        stood still for it.
        """
        stood = 0.0
        while True:
            began = time.monotonic()
            try:
                answer = await self._checked(method, bindings=documents, seconds=_SLICE_S, **more)
            except Refused:
                await self._checked("slots_abandon")
                raise
            seconds = time.monotonic() - began
            if not answer["left"]:
                return answer, stood + seconds
            stood += min(seconds, _SLICE_S)
            await asyncio.sleep(_REST_S)

    async def capture(
        self,
        definition: str,
        calls: int,
        every: int,
        min_m: int,
        max_m: int,
        *,
        max_mib: int = 64,
        ring: bool = False,
    ) -> None:
        """Keeps inputs of one call in `every`: the first `calls` that come, or as a ring the last."""
        await self._checked(
            "slots_capture",
            definition=definition,
            calls=calls,
            every=every,
            min_m=min_m,
            max_m=max_m,
            max_mib=max_mib,
            ring=ring,
        )

    async def captured(self, directory: Path, *, weight: bool = False) -> list[dict[str, Any]]:
        """Ends the capture; a path of inputs, and M, for each call, and with `weight` a path of the first one's weight."""
        answer = await self._checked("slots_captured", directory=str(directory), weight=weight)
        calls: list[dict[str, Any]] = answer["calls"]
        return calls

    async def capture_stop(self) -> None:
        """Ends the capture, and forgets what it held."""
        await self._checked("slots_capture_stop")

    async def exercise(self, m: int) -> None:
        """Makes the engine compute steps of about `m` tokens, with greedy requests of our own."""
        await self._computed(m, temperature=0.0)

    async def exercise_sampling(self, m: int) -> None:
        """The same with requests whose tokens are sampled by top-k and top-p: greedy ones never mask their logits."""
        await self._computed(m, top_k=_TOP_K, top_p=_TOP_P)

    async def _computed(self, m: int, **sampling: Any) -> None:
        if m <= self.most_seqs():
            asked = (self._generate(length=2, tokens=2, sampling=sampling) for _ in range(m))
            await asyncio.gather(*asked)
        else:
            await self._generate(length=min(m, self.max_model_len - 2), tokens=1, sampling=sampling)

    async def _generate(self, length: int, tokens: int, sampling: dict[str, Any]) -> None:
        from vllm import SamplingParams  # noqa: PLC0415

        self._requests += 1
        # Another first token each time: a prompt that is in the prefix cache would be computed in fewer tokens.
        vocabulary = int(self.llm.model_config.get_vocab_size())
        prompt = {
            "prompt_token_ids": [(self._requests * 31 + position) % vocabulary for position in range(length)]
        }
        chosen = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)
        try:
            async for _ in self.llm.generate(prompt, chosen, request_id=f"{SELF_PREFIX}{self._requests}"):
                pass
        except self._dead as error:
            raise Retryable(f"the engine died under a request of our own: {error}") from error

    async def _call(self, method: str, **keywords: Any) -> dict[str, Any]:
        """The first rank's answer."""
        return (await self._all(method, **keywords))[0]

    async def _all(self, method: str, **keywords: Any) -> list[dict[str, Any]]:
        """Every rank's answer, in the order of ranks; of data-parallel engines all, one after the other."""
        if self._engines > 1:
            call = _every_engine(self.llm.engine_core, method, keywords)
        else:
            call = self.llm.collective_rpc(method, timeout=_RPC_TIMEOUT_S, kwargs=keywords)
        answers: list[dict[str, Any]] = await self._guarded(call)
        self._ranks = len(answers)
        return answers

    @property
    def _engines(self) -> int:
        """Data-parallel engines behind this front."""
        return max(1, len(getattr(getattr(self.llm, "engine_core", None), "core_engines", ())))

    async def _guarded(self, call: Awaitable[Any]) -> Any:
        """Raises `Retryable` where it does not answer."""
        return await answered(call, self._dead)

    async def _checked(self, method: str, **keywords: Any) -> dict[str, Any]:
        """The first rank's answer, where all ranks agree; `left` is that of the rank with the most to do."""
        answers = await self._all(method, **keywords)
        for rank, answer in enumerate(answers):
            if not answer["ok"]:
                where = f"rank {rank} of {len(answers)}: " if len(answers) > 1 else ""
                raise Refused(f"{where}{answer['reason']}")
        if "left" in answers[0]:
            return answers[0] | {"left": max(answer["left"] for answer in answers)}
        return answers[0]


async def _every_engine(core: Any, method: str, keywords: dict[str, Any]) -> list[dict[str, Any]]:
    """VLLM's own `collective_rpc` gives back what the first of several engines answers."""
    call = core._call_utility_async  # noqa: SLF001 - the public ways lead to one engine, or came with 0.32
    asked = [
        call("collective_rpc", method, _RPC_TIMEOUT_S, (), keywords, engine=engine)
        for engine in core.core_engines
    ]
    return [answer for answers in await asyncio.gather(*asked) for answer in answers]


def _raise_for_parted(flipped: list[dict[str, Any]]) -> None:
    """Ranks that change at different steps compute one token by two revisions.

    Raises:
        Refused: they did.
    """
    steps = [answer.get("step") for answer in flipped]
    if len(set(steps)) > 1:
        raise Refused(f"the ranks changed at different steps: {', '.join(map(str, steps))}")
    if not all(answer["ok"] for answer in flipped):
        raise Refused("; ".join(answer["reason"] for answer in flipped if not answer["ok"]))
