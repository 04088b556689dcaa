"""The parts of the demo that decide what it says."""

import json
from dataclasses import replace

import pytest
from benchmarks.demo import stack, trace
from benchmarks.demo.__main__ import CHAT, CODE
from benchmarks.demo.load import Outcome, Tally
from benchmarks.demo.measure import Block, Comparison, same_text
from benchmarks.demo.story import Story, sentence
from benchmarks.demo.table import Result

GOOD = Result(
    requests=10,
    failed=0,
    truncated=0,
    promotions=1,
    numerics="reordered",
    slot_baseline_ratio=1.0,
    stolen_s=1.0,
    speedup=1.2,
    speedup_low=1.1,
    speedup_high=1.3,
    drift_to_promotion_s=60.0,
    greedy_agreement=1.0,
    greedy_agreement_incumbent=1.0,
)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"promotions": 0}, 3),
        ({"speedup_low": 0.99}, 3),
        ({"failed": 1}, 1),
        ({"truncated": 1}, 1),
    ],
)
def test_the_exit_code_says_what_happened(change: dict[str, float], code: int) -> None:
    assert replace(GOOD, **change).exit_code == code


def test_the_last_line_has_the_promised_keys() -> None:
    assert list(json.loads(json.dumps(GOOD.as_dict()))) == [
        "requests",
        "failed",
        "truncated",
        "promotions",
        "numerics",
        "slot_baseline_ratio",
        "stolen_s",
        "speedup",
        "speedup_low",
        "speedup_high",
        "drift_to_promotion_s",
        "greedy_agreement",
        "greedy_agreement_incumbent",
    ]


def test_a_scaled_trace_keeps_order_and_bounds_and_repeats_by_seed() -> None:
    rows = list(trace.requests("conv", CHAT, seed=7))
    assert len(rows) >= 200
    assert [r.at_s for r in rows] == sorted(r.at_s for r in rows)
    assert all(4 <= r.max_tokens <= CHAT.max_output for r in rows)
    assert rows == list(trace.requests("conv", CHAT, seed=7))


def test_code_traffic_differs_from_chat_as_the_real_traces_do() -> None:
    chat = [r.max_tokens for r in trace.requests("conv", CHAT, seed=7)]
    code = [r.max_tokens for r in trace.requests("code", CODE, seed=7)]
    assert sorted(code)[len(code) // 2] < 0.6 * sorted(chat)[len(chat) // 2]


def outcome(*, ok: bool = True, truncated: bool = False, text: str = "") -> Outcome:
    return Outcome(ok=ok, truncated=truncated, tokens=3, ttft_s=0.1, total_s=0.5, text=text)


def test_failures_and_cut_streams_are_counted_apart() -> None:
    tally = Tally([outcome(), outcome(ok=False), outcome(truncated=True)])
    assert (tally.failed, tally.truncated) == (1, 1)
    assert outcome().tpot_s == pytest.approx(0.2)


def test_ratios_are_paired_by_round() -> None:
    """Rounds that drift by a factor of two leave a steady ratio with a narrow interval."""
    blocks = [
        Block(arm, rate * speed * (1 + 0.002 * i), 1 / rate)
        for i, rate in enumerate([10.0, 20.0, 15.0, 11.0, 18.0])
        for arm, speed in (("plain", 1.0), ("tuned", 1.3))
    ]
    ratio = Comparison(1, tuple(blocks)).ratio("tuned", "plain", 1)
    assert ratio.point == pytest.approx(1.3, rel=1e-6)
    assert ratio.high - ratio.low < 0.01


def test_greedy_agreement_is_the_share_of_equal_texts() -> None:
    assert same_text([outcome(text="a"), outcome(text="b")], [outcome(text="a"), outcome(text="c")]) == 0.5


def event(name: str, time: str, **data: object) -> dict[str, object]:
    return {"type": f"polymorph.evt.{name}.v1", "time": time, "data": data}


def test_drift_to_promotion_is_taken_from_the_events_that_belong_together() -> None:
    story = Story(
        events=[
            event("traffic.drift-detected", "2026-01-01T00:00:00Z", drift_id="a"),
            event("traffic.drift-detected", "2026-01-01T00:00:30Z", drift_id="b"),
            event("promotion.completed", "2026-01-01T00:01:30Z", drift_id="b"),
        ]
    )
    assert story.drift_to_promotion_s() == 60.0
    assert Story().drift_to_promotion_s() is None


def test_every_event_that_the_demo_tells_is_one_line() -> None:
    told = sentence(
        event(
            "candidate.evaluated",
            "2026-01-01T00:00:00Z",
            candidate_id="c1",
            verdict="failed",
            gate="G3",
            reason="slower",
            speedup={"point": 0.9, "low": 0.8, "high": 1.0},
        )
    )
    assert told is not None
    assert "c1 failed at G3 0.900x [0.800, 1.000]: slower" in told
    assert sentence(event("worker.host-leased", "2026-01-01T00:00:00Z")) is None


def test_only_a_folder_of_a_demonstration_is_emptied(tmp_path):
    made = tmp_path / "demo"
    stack.clear(made)
    (made / "old").touch()
    stack.clear(made)
    assert not (made / "old").exists()
    theirs = tmp_path / "home"
    theirs.mkdir()
    (theirs / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is left alone"):
        stack.clear(theirs)
    assert (theirs / "thesis.tex").exists()
