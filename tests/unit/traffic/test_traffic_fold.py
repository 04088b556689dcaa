"""Windows folded from telemetry."""

import datetime as dt

import pytest

from polymorph.events.types import RequestFinished, RequestStarted, StepsCounted, TokensCounted
from polymorph.events.values import Operation, SampledSteps
from polymorph.traffic.fold import Window

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def at(seconds: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=seconds)


def started(name: str, seconds: float) -> RequestStarted:
    return RequestStarted(
        pool="p", request_id=name, worker_id="w", program_id=None, placed_by="router", at=at(seconds)
    )


def finished(name: str, seconds: float) -> RequestFinished:
    return RequestFinished(
        pool="p",
        request_id=name,
        worker_id="w",
        status=200,
        outcome="ok",
        first_byte_s=0.1,
        total_s=1,
        at=at(seconds),
    )


def counted(prompt: int, output: int, *, cached: int = 0, domain: str = "chat") -> TokensCounted:
    return TokensCounted(
        pool="p",
        worker_id="w",
        request_id="r",
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        ttft_s=0.2,
        tpot_s=0.01,
        domain=domain,
        at=T0,
    )


def steps(step_s: float, by_m: dict[str, float], linear: float, revision: str = "r1") -> StepsCounted:
    return StepsCounted(
        pool="p",
        worker_id="w",
        at=T0,
        interval_s=1,
        steps=10,
        step_s=step_s,
        tokens=100,
        output_tokens=50,
        running=1,
        waiting=0,
        kv_used=0.1,
        step_s_by_m=by_m,
        operations=(Operation(definition="linear", share=linear),),
        revision=revision,
    )


def fold(window: Window, *messages: object) -> Window:
    for message in messages:
        window.take(message)
    return window


def test_concurrency_is_the_mean_over_time_and_goes_on_in_the_next_window():
    window = fold(Window("p", T0), started("a", 0), started("b", 5), finished("a", 10))
    shape = window.close(at(10), model="m", workers=1).shape
    assert shape.concurrency == pytest.approx(1.5)
    assert shape.arrival_rate == pytest.approx(0.2)
    following = fold(window.next(at(10)), finished("b", 15))
    observed = following.close(at(20), model="m", workers=1)
    assert observed.shape.concurrency == pytest.approx(0.5)
    assert observed.shape.arrival_rate == 0
    assert observed.window_start == at(10)


def test_even_gaps_are_not_bursty_and_uneven_ones_are():
    even = fold(Window("p", T0), *(started(str(n), n) for n in range(10)))
    assert even.close(at(10), model="m", workers=1).shape.burstiness == pytest.approx(0)
    bursts = fold(Window("p", T0), *(started(str(n), 9 * (n // 5) + 0.01 * n) for n in range(10)))
    assert bursts.close(at(10), model="m", workers=1).shape.burstiness > 4


def test_a_request_sent_to_a_second_worker_arrives_once():
    window = fold(Window("p", T0), started("a", 1), started("a", 2))
    assert window.close(at(10), model="m", workers=1).shape.arrival_rate == pytest.approx(0.1)


def test_lengths_hits_and_domains_come_from_the_engine():
    window = fold(
        Window("p", T0), counted(100, 10, cached=50), counted(300, 30), counted(300, 20, domain="code")
    )
    observed = window.close(at(10), model="m", workers=2)
    assert observed.shape.requests == 3
    assert observed.shape.prompt_tokens.p50 == 300
    assert observed.shape.output_tokens.mean == pytest.approx(20)
    assert observed.shape.prefix_hit_rate == pytest.approx(50 / 700)
    assert observed.shape.domains == {"chat": pytest.approx(2 / 3), "code": pytest.approx(1 / 3)}
    assert observed.output_tokens_per_s == pytest.approx(6)
    assert observed.ttft_s.p50 == pytest.approx(0.2)
    assert observed.workers == 2


def test_shares_weigh_by_step_time_over_workers():
    window = fold(Window("p", T0), steps(3.0, {"8": 2.0, "16": 1.0}, 0.5), steps(1.0, {"16": 1.0}, 0.9, "r2"))
    observed = window.close(at(10), model="m", workers=2)
    assert observed.shape.tokens_per_step == {"8": pytest.approx(0.5), "16": pytest.approx(0.5)}
    assert list(observed.shape.tokens_per_step) == ["8", "16"]
    (operation,) = observed.operations
    assert operation.definition == "linear"
    assert operation.share == pytest.approx(0.6)
    assert observed.output_tokens_per_s == pytest.approx(10)
    assert observed.revision == "r2"


def test_loads_of_experts_weigh_by_the_time_of_their_operation():
    window = Window("p", T0)
    for step_s, experts in ((1.0, (0.75, 0.25)), (3.0, (0.55, 0.45))):
        sent = steps(step_s, {"8": step_s}, 0.5)
        operation = Operation(definition="moe", share=0.5, experts=experts)
        window.take(sent.model_copy(update={"operations": (operation, *sent.operations)}))
    observed = {each.definition: each for each in window.close(at(10), model="m", workers=2).operations}
    assert observed["moe"].experts == pytest.approx((0.6, 0.4))
    assert observed["linear"].experts == ()


def test_an_idle_window_is_empty_and_one_with_a_request_in_flight_is_not():
    window = Window("p", T0)
    assert window.empty
    assert not fold(window, started("a", 1)).empty
    assert not window.next(at(10)).empty
    # A request whose end was lost does not count for ever.
    assert window.next(at(10)).next(at(2000)).empty


def test_parallel_requests_under_one_request_id_each_arrive():
    """Agents send parallel calls under one trace id; the gateway's placement id tells them apart."""
    window = Window("p", T0)
    for placement in ("a", "b", "a"):
        window.take(
            RequestStarted(
                pool="p",
                request_id="trace-7",
                worker_id="w",
                program_id=None,
                placed_by="router",
                at=T0,
                placement_id=placement,
            )
        )
    shape = window.close(T0 + dt.timedelta(seconds=5), model="m", workers=1).shape
    assert shape.arrival_rate == pytest.approx(2 / 5)
    assert shape.concurrency == pytest.approx(2.0)


def test_profiled_steps_stand_for_the_steps_of_their_size() -> None:
    window = Window("p", T0)
    small = SampledSteps(steps=2, seconds={"linear": 0.03, "rest": 0.01})
    large = SampledSteps(steps=1, seconds={"linear": 0.01, "attention": 0.01, "other": 0.02})
    report = steps(4.0, {"1": 3.0, "64": 1.0}, 0.5)
    window.take(report.model_copy(update={"sampled_by_m": {"1": small}}))
    window.take(steps(0, {}, 0.0).model_copy(update={"sampled_by_m": {"64": large}}))
    told = window.close(at(10), model="m", workers=1).step_time
    assert told is not None
    assert told.sampled_steps == 3
    assert told.shares == pytest.approx(
        {"linear": 0.75 * 0.75 + 0.25 * 0.25, "rest": 0.75 * 0.25, "other": 0.125, "attention": 0.0625}
    )
    assert told.reachable == pytest.approx(1 - 0.75 * 0.25 - 0.125)


def test_without_a_profiled_step_nothing_is_said_of_step_time() -> None:
    window = Window("p", T0)
    window.take(steps(4.0, {"1": 3.0}, 0.5))
    assert window.close(at(10), model="m", workers=1).step_time is None
