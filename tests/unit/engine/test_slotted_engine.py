"""Calls of the slots reach every rank of every data-parallel engine, and all of an engine's ranks change at one step."""

from types import SimpleNamespace
from typing import Any

import pytest

from polymorph.bus.errors import Retryable
from polymorph.engine.bindings import SlotBinding
from polymorph.engine.loading.admission import Refused
from polymorph.engine.loading.engine import SlottedEngine

COUNTED = {
    "definitions": {},
    "artifacts": {"a": {"served": {"calls": 7}, "errors": 0, "by_m": {}}},
    "steps": {},
}


class Engines:
    """An AsyncLLM over two engines of two ranks each; `steps` are those at which each engine's ranks flip."""

    errored = False

    def __init__(self, *steps: tuple[int, int]) -> None:
        self.steps = dict(enumerate(steps))
        self.calls: list[tuple[int, str]] = []
        self.refuses: int | None = None
        self.left = 0
        """Weights that the last rank has to pack, one a call."""
        self.engine_core = SimpleNamespace(core_engines=[0, 1], _call_utility_async=self.call)

    async def call(self, name: str, method: str, seconds: Any, args: Any, named: Any, *, engine: int) -> Any:
        assert (name, args) == ("collective_rpc", ())
        self.calls.append((engine, method))
        if method == "slots_stage" and engine == self.refuses:
            return [{"ok": True, "reason": "", "left": 0}, {"ok": False, "reason": "no room", "left": 0}]
        left = [0, self.left] if method == "slots_stage" and engine == 1 else [0, 0]
        self.left -= max(left) > 0
        return [
            {"ok": True, "reason": "", "left": packs, "seconds": 0.1, "step": step, "counted": COUNTED}
            for step, packs in zip(self.steps[engine], left, strict=True)
        ]


class Alone:
    """An AsyncLLM of one rank."""

    errored = False
    refuses = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool | None]] = []
        self.left = 0
        self.engine_core = SimpleNamespace()

    async def collective_rpc(self, method: str, timeout: float, kwargs: dict[str, Any]) -> Any:  # noqa: ASYNC109 - vLLM's name
        self.calls.append((method, kwargs.get("keep_packed")))
        if method == "slots_engage" and self.refuses:
            return [{"ok": False, "reason": "no room", "left": 0}]
        left = self.left
        self.left = max(0, left - 1)
        return [{"ok": True, "reason": "", "left": left, "seconds": 0.1, "step": 7, "counted": COUNTED}]


def engine_of(llm: Any) -> SlottedEngine:
    return SlottedEngine(llm, slotted=True, dead=ValueError)


BINDINGS = [SlotBinding("gemm_n16_k16_f32", 1, 8, "path", "artifact")]


async def test_engines_flip_apart_and_the_ranks_of_one_together() -> None:
    llm = Engines((7, 7), (9, 9))
    await engine_of(llm).engage(BINDINGS)
    assert llm.calls == [(engine, method) for method in ("slots_stage", "slots_flip") for engine in (0, 1)]
    with pytest.raises(Refused, match="the ranks changed at different steps: 9, 8"):
        await engine_of(Engines((7, 7), (9, 8))).engage(BINDINGS)


async def test_none_flips_before_the_last_rank_has_packed_its_weights() -> None:
    llm = Engines((7, 7), (9, 9))
    llm.left = 2
    await engine_of(llm).engage(BINDINGS)
    staged = [(engine, "slots_stage") for engine in (0, 1)]
    assert llm.calls == 3 * staged + [(engine, "slots_flip") for engine in (0, 1)]


async def test_where_one_rank_of_one_engine_cannot_none_flips() -> None:
    llm = Engines((7, 7), (9, 9))
    llm.refuses = 1
    with pytest.raises(Refused, match="rank 3 of 4: no room"):
        await engine_of(llm).engage(BINDINGS)
    methods = [method for _, method in llm.calls]
    assert "slots_flip" not in methods
    assert methods.count("slots_abandon") == 2


async def test_one_rank_packs_stages_and_flips_in_one_call_and_says_what_it_had_counted() -> None:
    llm = Alone()
    engine = engine_of(llm)
    await engine.read()  # who asked it before knows that it is alone
    llm.left = 2
    engaged = await engine.engage(BINDINGS, keep_packed=True)
    assert llm.calls[1:] == [("slots_engage", True)] * 3
    assert engaged.counted.served == {"a": 7}
    llm.refuses = True
    with pytest.raises(Refused, match="no room"):
        await engine.engage(BINDINGS)
    assert [name for name, _ in llm.calls[-2:]] == ["slots_engage", "slots_abandon"]


async def test_an_engine_that_is_silent_is_asked_again_later() -> None:
    llm = Engines((7, 7), (9, 9))

    async def silent(*_: Any, **__: Any) -> Any:
        raise TimeoutError("60 s")

    llm.engine_core._call_utility_async = silent
    with pytest.raises(Retryable, match="the engine does not answer: 60 s"):
        await engine_of(llm).describe()


@pytest.mark.parametrize(
    "failure",
    ["Call to collective_rpc method failed: RPC call to slots_stage timed out.", "Server shutting down"],
)
async def test_a_call_that_failed_in_the_engine_is_made_again_later(failure: str) -> None:
    """VLLM's front raises what failed in its core as a plain `Exception`."""
    llm = Engines((7, 7), (9, 9))

    async def fails(*_: Any, **__: Any) -> Any:
        raise Exception(failure)  # noqa: TRY002 - as vLLM's client does

    llm.engine_core._call_utility_async = fails
    with pytest.raises(Retryable, match=failure):
        await engine_of(llm).engage(BINDINGS)


async def test_an_error_of_our_own_is_not_asked_again() -> None:
    llm = Engines((7, 7), (9, 9))

    async def wrong(*_: Any, **__: Any) -> Any:
        raise KeyError("slots")

    llm.engine_core._call_utility_async = wrong
    with pytest.raises(KeyError):
        await engine_of(llm).describe()
