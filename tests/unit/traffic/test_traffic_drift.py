"""Distance and drift: properties, and real traces of two services."""

import csv
import datetime as dt
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polymorph.events.types import RequestFinished, RequestStarted, TokensCounted, TrafficShapeObserved
from polymorph.events.values import Operation, StepTime, TrafficShape
from polymorph.traffic.distance import distance
from polymorph.traffic.drift import DriftDetector, DriftRules
from polymorph.traffic.fold import Window
from polymorph.traffic.merge import merge
from polymorph.traffic.sketch import of

# A busy machine is no failure.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"


def shape(
    prompt: float = 400,
    output: float = 100,
    concurrency: float = 4,
    steps: dict[str, float] | None = None,
    requests: int = 16,
) -> TrafficShape:
    return TrafficShape(
        requests=requests,
        arrival_rate=1.0,
        burstiness=1.0,
        concurrency=concurrency,
        prompt_tokens=of([prompt]),
        output_tokens=of([output]),
        tokens_per_step=steps or {},
    )


def observed(number: int, of_shape: TrafficShape) -> TrafficShapeObserved:
    return TrafficShapeObserved(
        pool="p", model="m", window_start=T0 + dt.timedelta(seconds=5 * number), window_s=5, shape=of_shape
    )


SHARES = st.dictionaries(st.sampled_from(["1", "8", "16", "32"]), st.floats(0.01, 1), min_size=1).map(
    lambda raw: {key: value / sum(raw.values()) for key, value in raw.items()}
)
SHAPES = st.builds(
    shape,
    prompt=st.floats(0, 1e5),
    output=st.floats(0, 1e5),
    concurrency=st.floats(0, 1e3),
    steps=st.one_of(st.none(), SHARES),
)


@PATIENT
@given(SHAPES, SHAPES)
def test_a_distance_is_symmetric_never_negative_and_0_to_itself(one, other):
    assert distance(one, one).total == 0
    assert distance(one, other).total >= 0
    assert distance(one, other).total == pytest.approx(distance(other, one).total)


@PATIENT
@given(SHAPES, SHAPES, SHAPES)
def test_a_distance_takes_no_detour(one, other, third):
    """The triangle inequality, where all are measured in an engine or none is."""
    if len({bool(one.tokens_per_step), bool(other.tokens_per_step), bool(third.tokens_per_step)}) == 1:
        direct = distance(one, third).total
        assert direct <= distance(one, other).total + distance(other, third).total + 1e-9


def test_steps_count_only_where_both_were_measured():
    one, other = shape(steps={"8": 1.0}), shape(steps={"64": 1.0})
    assert distance(one, other).steps == 1
    assert distance(one, other).total == pytest.approx(2)
    assert distance(one, shape()).steps is None
    assert distance(one, shape()).total == 0


def test_an_untuned_pool_drifts_once_there_is_evidence():
    detector = DriftDetector(DriftRules(consecutive=2, min_requests=30))
    found = [detector.observe(observed(n, shape(requests=10)), None) for n in range(8)]
    assert [drift is not None for drift in found] == [False, False, False, True, *[False] * 4]
    drift = found[3]
    assert drift.tuned_for is None
    assert drift.observed.requests == 30
    assert "never tuned" in drift.reason
    assert "prompts of 400 tokens" in drift.reason


def test_a_drift_tells_where_the_time_went_while_it_was_seen_not_in_its_last_window():
    detector = DriftDetector(DriftRules(consecutive=1, min_requests=32))

    def window(number: int, step_s: float, *operations: Operation) -> TrafficShapeObserved:
        return observed(number, shape()).model_copy(update={"step_s": step_s, "operations": operations})

    gemm = Operation(definition="gemm", share=0.5, by_m={"1": 0.3, "64": 0.2})
    assert detector.observe(window(0, 3.0, gemm), None) is None
    drift = detector.observe(window(1, 1.0, Operation(definition="head", share=0.8, by_m={"1": 0.8})), None)
    assert drift is not None
    assert [(o.definition, round(o.share, 6)) for o in drift.operations] == [("gemm", 0.375), ("head", 0.2)]
    assert drift.operations[0].by_m == pytest.approx({"1": 0.225, "64": 0.15})


def test_a_drift_tells_what_profiled_steps_of_all_its_windows_say() -> None:
    def window(number: int, step_s: float, told: StepTime | None) -> TrafficShapeObserved:
        return observed(number, shape()).model_copy(update={"step_s": step_s, "step_time": told})

    detector = DriftDetector(DriftRules(consecutive=1, min_requests=48))
    detector.observe(window(0, 1.0, StepTime(shares={"linear": 0.8}, reachable=0.8, sampled_steps=1)), None)
    detector.observe(window(1, 9.0, None), None)
    last = StepTime(shares={"linear": 0.4, "rest": 0.6}, reachable=0.4, sampled_steps=3)
    drift = detector.observe(window(2, 3.0, last), None)
    assert drift is not None
    assert drift.step_time is not None
    assert drift.step_time.shares == pytest.approx({"linear": 0.5, "rest": 0.45})
    assert (round(drift.step_time.reachable, 6), drift.step_time.sampled_steps) == (0.5, 4)


def test_drift_needs_windows_in_a_row_and_is_told_once():
    detector = DriftDetector(DriftRules(consecutive=3, min_requests=10))
    near, far = shape(), shape(output=5, concurrency=40)
    told = [
        detector.observe(observed(n, s), near) for n, s in enumerate([far, far, near, far, far, far, far])
    ]
    assert [drift is not None for drift in told] == [False] * 5 + [True, False]
    drift = told[5]
    assert drift.windows == 3
    assert drift.distance > drift.threshold
    assert drift.reason == (
        "Since the last tuning outputs went from 100 to 5 tokens (median) and requests in flight went from 4.0 to"
        " 40.0."
    )


def test_after_drift_it_is_quiet_until_it_was_near_again_or_tuned_anew():
    rules = DriftRules(consecutive=1, min_requests=10, threshold=1.0, rearm=0.5)
    near, far = shape(), shape(output=5)
    between = shape(output=47)  # 0.75 away: below the threshold, above where it is armed again
    detector = DriftDetector(rules)
    sequence = [far, between, far, near, far]
    told = [detector.observe(observed(n, s), near) is not None for n, s in enumerate(sequence)]
    assert told == [True, False, False, False, True]
    assert detector.observe(observed(9, near), far) is not None


def test_the_same_windows_name_the_same_drift():
    def run() -> str:
        detector = DriftDetector(DriftRules(consecutive=1, min_requests=10))
        return detector.observe(observed(3, shape(output=1)), shape()).drift_id

    assert run() == run()


def test_the_reason_names_steps_in_words():
    detector = DriftDetector(DriftRules(consecutive=1, min_requests=10))
    before, after = shape(steps={"1": 0.9, "16": 0.1}), shape(steps={"1": 0.1, "16": 0.9})
    drift = detector.observe(observed(0, after), before)
    assert "steps of 9 to 16 tokens went from 10% to 90% of engine time" in drift.reason


def windows(name: str, window_s: float = 5.0) -> list[TrafficShapeObserved]:
    """A trace as the router would fold it, on an engine of 50 tokens a second a request."""
    found: list[tuple[float, object]] = []
    with (TRACES / name).open() as file:
        for number, row in enumerate(csv.DictReader(file)):
            arrival, output = float(row["arrival_s"]), int(row["output_tokens"])
            end = arrival + 0.2 + 0.02 * output
            found += _messages(str(number), arrival, end, int(row["prompt_tokens"]), output)
    window, closed = Window("p", T0), []
    for seconds, message in sorted(found, key=lambda item: item[0]):
        while seconds >= (len(closed) + 1) * window_s:
            end_at = T0 + dt.timedelta(seconds=(len(closed) + 1) * window_s)
            closed.append(window.close(end_at, model="m", workers=1))
            window = window.next(end_at)
        window.take(message)
    return closed


def _messages(name: str, arrival: float, end: float, prompt: int, output: int) -> list[tuple[float, object]]:
    begin, finish = T0 + dt.timedelta(seconds=arrival), T0 + dt.timedelta(seconds=end)
    start = RequestStarted(
        pool="p", request_id=name, worker_id="w", program_id=None, placed_by="router", at=begin
    )
    tokens = TokensCounted(
        pool="p",
        worker_id="w",
        request_id=name,
        prompt_tokens=prompt,
        cached_tokens=0,
        output_tokens=output,
        ttft_s=0.2,
        tpot_s=0.02,
        at=finish,
    )
    done = RequestFinished(
        pool="p",
        request_id=name,
        worker_id="w",
        status=200,
        outcome="ok",
        first_byte_s=0.2,
        total_s=1,
        at=finish,
    )
    return [(arrival, start), (end, tokens), (end, done)]


def test_on_real_traces_a_shift_is_seen_and_a_steady_service_is_not():
    conv, code = windows("azure_2023_conv_sample.csv"), windows("azure_2023_code_sample.csv")
    conv = conv[3:]  # while an empty engine fills, only short answers have ended
    half = len(conv) // 2
    tuned_for = merge(conv[:half])
    assert distance(tuned_for, merge(conv[half:])).total < 0.75
    assert distance(tuned_for, merge(code)).total > 2
    detector = DriftDetector()
    assert [drift for window in conv[half:] if (drift := detector.observe(window, tuned_for))] == []
    day = dt.timedelta(days=1)
    later = [w.model_copy(update={"window_start": w.window_start + day}) for w in code]
    seen = [n for n, window in enumerate(later) if detector.observe(window, tuned_for)]
    assert len(seen) >= 1
    assert seen[0] < 24  # two minutes


def test_and_the_other_way_round():
    conv, code = windows("azure_2023_conv_sample.csv"), windows("azure_2023_code_sample.csv")
    detector = DriftDetector()
    tuned_for = merge(code)
    assert any(detector.observe(window, tuned_for) for window in conv[:24])


@PATIENT
@given(st.lists(SHAPES, min_size=1, max_size=5))
def test_merging_keeps_requests_and_shares(shapes):
    merged = merge([observed(n, s) for n, s in enumerate(shapes)])
    assert merged.requests == sum(s.requests for s in shapes)
    if merged.tokens_per_step:
        assert sum(merged.tokens_per_step.values()) == pytest.approx(1)


def test_merging_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one window"):
        merge([])


def test_one_burst_told_thrice_or_followed_by_silence_is_one_judgement():
    rules = DriftRules(consecutive=3, min_requests=16)
    again, silent = DriftDetector(rules), DriftDetector(rules)
    for number in range(3):
        assert again.observe(observed(0, shape()), None) is None
        assert silent.observe(observed(number, shape(requests=0 if number else 16)), None) is None
    assert [silent.observe(observed(n, shape()), None) is not None for n in (3, 4, 5)] == [False, True, False]
