"""Requests that go on in another engine: what their caller sees is what it would have seen without the death."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.doubles.engine_core import ScriptedCore, make_async_mp_client
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import core_client
from vllm.v1.engine.exceptions import EngineDeadError

from polymorph.engine.resume import DRAWS
from polymorph.worker.adapters import continuing
from polymorph.worker.adapters.continuing import CannotContinue, ContinuingLLM

MODEL = Path(__file__).parents[3] / "models" / "tiny-dense"
PROMPT = [5, 7, 11, 13]
KINDS = tuple(RequestOutputKind)


class Fleet:
    """Fronts of one worker, each over a double of an engine; a new one is there as soon as one died."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.fronts: list[ContinuingLLM] = []
        self.cores: list[ScriptedCore] = []
        self.outcomes: list[bool] = []
        self._next: list[int | None] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, *lives: int | None) -> ContinuingLLM:
        """A front whose engine makes so many steps, and its successors'."""
        self._next = list(lives)
        return self._open()

    def _open(self) -> ContinuingLLM:
        core = ScriptedCore(self._next.pop(0) if self._next else None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                core_client.EngineCoreClient, "make_async_mp_client", make_async_mp_client(lambda: core)
            )
            front = ContinuingLLM.from_vllm_config(self._config, disable_log_stats=False)
        front.recovers, front.seeds_resume = True, True
        front.on_death = lambda: self._died(front)
        front.on_outcome = self.outcomes.append
        self.fronts.append(front)
        self.cores.append(core)
        return front

    def _died(self, front: ContinuingLLM) -> None:
        task = asyncio.get_running_loop().create_task(self._replace(front))
        self._tasks.add(task)

    async def _replace(self, front: ContinuingLLM) -> None:
        await asyncio.sleep(0.002)
        await front.succeed(self._open())

    async def close(self) -> None:
        for front in self.fronts:
            front.shutdown()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def config() -> Any:
    return AsyncEngineArgs(model=str(MODEL), max_model_len=512, dtype="float32").create_engine_config()


@contextlib.asynccontextmanager
async def fleet(config: Any) -> AsyncIterator[Fleet]:
    made = Fleet(config)
    try:
        yield made
    finally:
        await made.close()


def sampled(kind: RequestOutputKind, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**{**fields, **changes}, output_kind=kind)


async def answer(front: ContinuingLLM, sampling: SamplingParams, name: str = "r") -> list[dict[str, Any]]:
    """What the caller was given, all deltas of one sequence put together."""
    found: dict[int, dict[str, Any]] = {}
    delta = sampling.output_kind is RequestOutputKind.DELTA
    async for output in front.generate({"prompt_token_ids": list(PROMPT)}, sampling, request_id=name):
        assert output.prompt_token_ids == PROMPT
        for part in output.outputs:
            seen = found.setdefault(part.index, {"text": "", "tokens": [], "logprobs": [], "finish": None})
            logprobs = [next(iter(each)) for each in part.logprobs or ()]
            seen["text"] = seen["text"] + part.text if delta else part.text
            seen["tokens"] = [*seen["tokens"], *part.token_ids] if delta else list(part.token_ids)
            seen["logprobs"] = [*seen["logprobs"], *logprobs] if delta else logprobs
            seen["finish"] = (part.finish_reason, part.stop_reason) if part.finish_reason else seen["finish"]
    assert output.metrics.num_generation_tokens == len(found[0]["tokens"]) or sampling.n > 1
    assert output.metrics.queued_ts <= output.metrics.scheduled_ts
    return [found[index] for index in sorted(found)]


async def undisturbed(config: Any, sampling: SamplingParams) -> list[dict[str, Any]]:
    async with fleet(config) as made:
        return await answer(made.open(None), sampling)


@given(
    kind=st.sampled_from(KINDS),
    lives=st.lists(st.integers(0, 11), min_size=1, max_size=2),
    seed=st.none() | st.integers(0, 99),
    n=st.integers(1, 3),
    min_tokens=st.integers(0, 20),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_caller_sees_what_it_would_have_seen(
    config: Any, kind: RequestOutputKind, lives: list[int], seed: int | None, n: int, min_tokens: int
) -> None:
    async def both() -> None:
        changes = {
            "seed": seed,
            "temperature": 0.0 if seed is None else 0.9,
            "n": n if seed is not None else 1,
        }
        sampling = sampled(kind, min_tokens=min_tokens, stop_token_ids=list(range(40)), **changes)
        expected = await undisturbed(config, sampling)
        async with fleet(config) as made:
            assert await answer(made.open(*lives), sampling) == expected
            assert len(made.cores) >= 2 or len(expected[0]["tokens"]) <= lives[0]
            assert all(made.outcomes)

    asyncio.run(both())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("life", range(1, 24, 3))
async def test_a_stop_string_may_lie_across_the_seam(config: Any, kind: RequestOutputKind, life: int) -> None:
    text = (await undisturbed(config, sampled(kind)))[0]["text"]
    stop = text[len(text) // 2 - 4 : len(text) // 2 + 4]
    sampling = sampled(kind, stop=[stop])
    expected = await undisturbed(config, sampling)
    assert expected[0]["finish"] == ("stop", stop)
    async with fleet(config) as made:
        assert await answer(made.open(life), sampling) == expected


async def test_the_successor_computes_the_rest_and_no_more(config: Any) -> None:
    async with fleet(config) as made:
        tokens = (await answer(made.open(6), sampled(KINDS[1], seed=3, temperature=0.7, min_tokens=8)))[0][
            "tokens"
        ]
        (request,) = made.cores[1].added
        assert request.prompt_token_ids == [*PROMPT, *tokens[:6]]
        assert (request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (18, 2)
        assert request.sampling_params.extra_args == {DRAWS: 6}


async def test_a_client_cannot_ask_for_draws(config: Any) -> None:
    async with fleet(config) as made:
        await answer(made.open(None), sampled(KINDS[1], extra_args={DRAWS: 1 << 40, "mine": 1}))
        assert made.cores[0].added[0].sampling_params.extra_args == {"mine": 1}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_cannot_go_on_ends_with_an_error_that_says_why(
    config: Any, kind: RequestOutputKind
) -> None:
    async with fleet(config) as made:
        with pytest.raises(CannotContinue, match="presence_penalty"):
            await answer(made.open(5), sampled(kind, presence_penalty=0.5))
        assert made.outcomes == [False]
        assert await answer(made.fronts[0], sampled(kind)) == await undisturbed(config, sampled(kind))


async def test_a_lossy_kernel_meets_no_request_that_began_without_it(config: Any) -> None:
    async with fleet(config) as made:
        front = made.open(5)
        front.numerics = "a lossy revision"
        with pytest.raises(CannotContinue, match="lossy"):
            await answer(front, sampled(KINDS[1]))


async def test_without_a_token_everything_is_sent_again(config: Any) -> None:
    grammar = StructuredOutputsParams(json_object=True)
    sampling = sampled(KINDS[1], structured_outputs=grammar, presence_penalty=0.5)
    async with fleet(config) as made:
        assert (await answer(made.open(0), sampling))[0]["finish"] == ("length", None)


async def test_a_request_under_which_engines_die_is_given_no_third(config: Any) -> None:
    async with fleet(config) as made:
        with pytest.raises(CannotContinue, match="3 times"):
            await answer(made.open(3, 2, 2), sampled(KINDS[1]))
        assert made.outcomes == [True, True, False]


async def test_a_client_that_leaves_while_there_is_no_engine_is_not_served_on(config: Any) -> None:
    async with fleet(config) as made:
        front = made.open(4)
        front.on_death = lambda: None
        asking = asyncio.create_task(answer(front, sampled(KINDS[1])))
        while not front.dead:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        heir = made._open()
        await front.succeed(heir)
        assert made.cores[1].added == []
        assert heir.output_processor.request_states == {}


async def test_a_client_that_leaves_afterwards_ends_it_in_the_successor(config: Any) -> None:
    async with fleet(config) as made:
        stream = made.open(4).generate(
            {"prompt_token_ids": PROMPT}, sampled(KINDS[1], max_tokens=400), request_id="r"
        )
        while len(made.cores) < 2 or not made.cores[1].running:
            await anext(stream)
        await stream.aclose()
        assert made.cores[1].running == {}
        assert made.fronts[1].output_processor.request_states == {}


async def test_newcomers_at_a_dead_front_are_passed_on(config: Any) -> None:
    async with fleet(config) as made:
        front = made.open(2)
        first = asyncio.create_task(answer(front, sampled(KINDS[1])))
        while not front.dead:
            await asyncio.sleep(0)
        assert not front.errored
        await front.check_health()
        second = await answer(front, sampled(KINDS[1]), "later")
        assert second == await first
        assert len(made.cores[1].added) == 2


async def test_a_request_that_fails_as_nobody_foresaw_ends_and_the_others_go_on(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = continuing.interrupted

    def unforeseen(state: Any, *more: Any) -> Any:
        if state.external_req_id == "wrong":
            raise KeyError("nobody foresaw it")
        return native(state, *more)

    monkeypatch.setattr(continuing, "interrupted", unforeseen)
    expected = await undisturbed(config, sampled(KINDS[1]))
    async with fleet(config) as made, asyncio.timeout(20):
        front = made.open(4)
        wrong = asyncio.create_task(answer(front, sampled(KINDS[1]), "wrong"))
        right = asyncio.create_task(answer(front, sampled(KINDS[1]), "right"))
        with pytest.raises(CannotContinue, match="nobody foresaw it"):
            await wrong
        assert await right == expected


async def test_without_a_successor_the_error_is_told(config: Any) -> None:
    async with fleet(config) as made:
        front = made.open(4)
        front.on_death = lambda: front.give_up("no engine could be started")
        with pytest.raises(CannotContinue, match="no engine could be started"):
            await answer(front, sampled(KINDS[1]))
        assert front.errored
        with pytest.raises(EngineDeadError):
            await answer(front, sampled(KINDS[1]))


async def test_a_front_that_does_not_recover_is_vllms_own(config: Any) -> None:
    async with fleet(config) as made:
        front = made.open(4)
        front.recovers = False
        front.on_death = lambda: None
        with pytest.raises(EngineDeadError):
            await answer(front, sampled(KINDS[1]))
        assert front.errored


async def _dead_heir(made: Fleet) -> ContinuingLLM:
    """Dead before anything is handed to it, as an engine may be whose kernels are still to be engaged."""
    heir = made._open()
    heir.listen()
    made.cores[-1].die()
    while not heir.output_handler.done():
        await asyncio.sleep(0)
    return heir


@pytest.mark.parametrize("next_first", [False, True])
@pytest.mark.parametrize("sequences", [1, 2])
async def test_where_the_successor_is_dead_as_well_the_next_gives_the_answer(
    config: Any, next_first: bool, sequences: int
) -> None:
    sampling = sampled(KINDS[1], n=sequences, seed=3, temperature=0.9)
    expected = await undisturbed(config, sampling)
    async with fleet(config) as made:
        first, asking = await _interrupted(made, sampling)
        heir, third = await _dead_heir(made), made._open()
        if next_first:
            await heir.succeed(third)
            await first.succeed(heir)
        else:
            await first.succeed(heir)
            newcomer = asyncio.create_task(answer(first, sampling, "later"))
            await heir.succeed(third)
            assert await newcomer == expected
        async with asyncio.timeout(10):
            assert await asking == expected
        assert made.cores[1].added == []
        assert made.outcomes == [True]


async def test_a_successor_that_dies_as_it_is_handed_over_costs_no_answer(config: Any) -> None:
    expected = await undisturbed(config, sampled(KINDS[1]))
    async with fleet(config) as made:
        first, asking = await _interrupted(made, sampled(KINDS[1]))
        heir, third = made._open(), made._open()
        heir.listen()
        made.cores[1].die()  # and nobody has read it yet
        await first.succeed(heir)
        await heir.succeed(third)
        async with asyncio.timeout(10):
            assert await asking == expected


async def test_an_engine_found_dead_after_its_successor_came_hands_its_requests_on(config: Any) -> None:
    expected = await undisturbed(config, sampled(KINDS[1]))
    async with fleet(config) as made:
        made._died = lambda front: None  # type: ignore[method-assign]
        first = made.open(None)
        asking = asyncio.create_task(answer(first, sampled(KINDS[1])))
        while not made.cores[0].running:
            await asyncio.sleep(0)
        await first.succeed(made._open())
        made.cores[0].die()
        async with asyncio.timeout(10):
            assert await asking == expected
        assert len(made.cores[1].added) == 1


async def test_a_dead_successor_without_a_next_ends_what_it_was_to_take(config: Any) -> None:
    async with fleet(config) as made:
        first, asking = await _interrupted(made, sampled(KINDS[1]))
        second = await _dead_heir(made)
        await first.succeed(second)
        second.give_up("no engine could be started")
        with pytest.raises(CannotContinue, match="no engine could be started"):
            await asyncio.wait_for(asking, 30)


async def test_a_client_that_leaves_while_the_successor_is_dead_is_not_served_on(config: Any) -> None:
    async with fleet(config) as made:
        first, asking = await _interrupted(made, sampled(KINDS[1]))
        heir, third = await _dead_heir(made), made._open()
        await first.succeed(heir)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await heir.succeed(third)
        assert made.cores[2].added == []


async def _interrupted(made: Fleet, sampling: SamplingParams) -> tuple[ContinuingLLM, "asyncio.Task[Any]"]:
    """A front whose engine died after three steps, with no successor yet, and whoever asked it."""
    made._died = lambda front: None  # type: ignore[method-assign]
    front = made.open(3)
    asking = asyncio.create_task(answer(front, sampling))
    while not front._orphans:
        await asyncio.sleep(0)
    return front, asking


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
