import numpy as np
import pytest

from polymorph.evaluator.adapters.records import Records
from polymorph.evaluator.app import last_cache
from polymorph.evaluator.domain.replay import prompts, replay
from polymorph.evaluator.domain.roofline import Call, Peaks
from polymorph.evaluator.domain.table import entry, widened, with_candidate
from polymorph.evaluator.domain.timing import calls_in_batch, copies_needed, schedule
from polymorph.evaluator.gates.findings import Design, Findings, Setting, verdict
from polymorph.evaluator.gates.pipeline import binding_of, typical
from polymorph.events.state import EMPTY
from polymorph.events.types import CandidateEvaluated, EvaluateCandidate
from polymorph.events.values import Gate, KernelBinding, Numerics, Ratio, Revision, Verdict
from polymorph.kernels.schema import TraceStatus, Workload

PEAKS = Peaks(bytes_per_s=10e9, flops_per_s=100e9)


def _workload(**extra: object) -> Workload:
    return Workload.model_validate({"uuid": "w", "axes": {"M": 4}, "inputs": {}, "x_polymorph": extra})


def _order(min_m: int, max_m: int) -> EvaluateCandidate:
    return EvaluateCandidate(
        pool="p", search_id="s", candidate_id="c", evaluation_id="e", hardware="h", definition="d", solution="",
        workload="", incumbent=EMPTY, until=Gate.G5_END_TO_END, min_m=min_m, max_m=max_m,
    )  # fmt: skip


def _verdict(
    candidate_s: float, incumbent_s: float, ratio: Ratio, **found: object
) -> tuple[Verdict, TraceStatus]:
    findings = Findings(
        seconds={"candidate": [candidate_s], "native": [incumbent_s]},
        packed_bytes=1_000_000,
        alone_s=incumbent_s,
    )
    for name, value in found.items():
        setattr(findings, name, value)
    setting = Setting(m=1, flops=1e6, resident=0.25, incumbent="native", slots=8, copies=32)
    outcome = verdict(setting, findings, ratio, Gate.G3_MICRO, Design(), PEAKS, {})
    return outcome.verdict, outcome.status


WIN = Ratio(point=1.5, low=1.4, high=1.6)


def test_a_clear_gain_passes_and_none_fails() -> None:
    assert _verdict(100e-6, 150e-6, WIN) == (Verdict.PASSED, TraceStatus.PASSED)
    assert _verdict(150e-6, 150e-6, Ratio(point=1, low=0.99, high=1.01))[0] is Verdict.FAILED
    assert _verdict(150e-6, 150e-6, Ratio(point=1, low=0.8, high=1.2))[0] is Verdict.INCONCLUSIVE


def test_faster_than_memory_is_a_hack() -> None:
    """1 MB of which a quarter may be cached takes 75 us at 10 GB/s, 50 us with the slack of the peak."""
    assert _verdict(45e-6, 150e-6, WIN) == (Verdict.FAILED, TraceStatus.REWARD_HACK)
    assert _verdict(55e-6, 150e-6, WIN)[0] is Verdict.PASSED


def test_an_incumbent_that_is_slowed_beside_the_candidate_says_nothing() -> None:
    assert _verdict(100e-6, 150e-6, WIN, alone_s=100e-6)[0] is Verdict.INCONCLUSIVE


def test_a_call_that_is_mostly_dispatch_says_nothing() -> None:
    assert _verdict(100e-6, 150e-6, WIN, dispatch_s=300e-6)[0] is Verdict.INCONCLUSIVE


def test_the_floor_is_the_dearer_of_memory_and_arithmetic() -> None:
    assert Call(bytes=3e6, flops=1e3).floor_s(PEAKS) == pytest.approx(200e-6)
    assert Call(bytes=3, flops=3e7).floor_s(PEAKS) == pytest.approx(200e-6)


def test_copies_defeat_the_cache_and_a_batch_is_long_enough() -> None:
    assert copies_needed(1_105_920, 8 << 20) == 31
    assert copies_needed(100 << 20, 8 << 20) == 1
    assert calls_in_batch(100e-6, 100) == 60
    assert calls_in_batch(100e-6, 31) == 31
    assert calls_in_batch(0.1, 31) == 1


def test_every_load_gets_its_pairs_in_random_order() -> None:
    pairs = list(schedule(5, 4, 31, np.random.default_rng(3)))
    assert sorted(pair.load for pair in pairs) == sorted([0, 1, 2, 3, 4] * 4)
    assert [pair.load for pair in pairs] != sorted(pair.load for pair in pairs)
    assert {pair.candidate_first for pair in pairs} == {True, False}


def test_the_heaviest_m_of_the_range_is_measured() -> None:
    work = _workload(m_weights={"1": 0.7, "8": 0.2, "16": 0.1})
    assert typical(work, 5, 16) == {8: 0.2, 16: 0.1}
    assert typical(_workload(), 1, 8) == {4: 1.0}
    assert typical(_workload(), 16, 32) == {16: 1.0}
    with pytest.raises(ValueError, match="holds nothing"):
        typical(_workload(), 8, 4)


def test_the_incumbent_is_what_serves_that_m() -> None:
    kernel = KernelBinding(
        definition="d", min_m=5, max_m=8, manifest="m", artifact="a", numerics=Numerics.REORDERED
    )
    revision = Revision(revision="r", kernels=(kernel,))
    assert binding_of(revision, "d", 8) == "a"
    assert binding_of(revision, "d", 4) is None
    assert binding_of(revision, "other", 8) is None


def test_a_table_keeps_what_the_candidate_does_not_take() -> None:
    held = [entry("d", 1, 64, "/a", "a", None), entry("other", 1, 64, "/b", "b", None)]
    table = with_candidate(held, entry("d", 5, 8, "/c", "c", None))
    assert [(e["artifact"], e["min_m"], e["max_m"]) for e in table] == [
        ("a", 1, 4), ("a", 9, 64), ("b", 1, 64), ("c", 5, 8),
    ]  # fmt: skip


def test_only_whole_buckets_are_bound() -> None:
    assert widened(_order(1, 8), 8) == (1, 8)
    assert widened(_order(4, 20), 20) == (5, 16)
    with pytest.raises(ValueError, match="no bucket"):
        widened(_order(6, 7), 7)


def test_a_replay_has_the_m_that_matters_and_fits_beside_serving() -> None:
    work = _workload(replay={"concurrency": 7.2, "prompt_tokens": {"p50": 300}})
    plan = replay(work, 8, max_num_seqs=32, max_model_len=1024)
    assert (plan.requests, plan.prompt_tokens, plan.served) == (7, 146, True)
    assert replay(work, 1, max_num_seqs=32, max_model_len=1024).requests == 1
    assert not replay(work, 512, max_num_seqs=32, max_model_len=1024).served


def test_prompts_have_their_length_and_share_no_beginning() -> None:
    made = prompts([[1, 2, 3], [4, 5, 6, 7]], 5, 9)
    assert [len(prompt) for prompt in made] == [9] * 5
    assert len({tuple(prompt[:3]) for prompt in made}) == 5


def test_a_record_gives_back_the_event_and_refuses_odd_names(tmp_path) -> None:
    records = Records(tmp_path)
    event = CandidateEvaluated(
        pool="p", search_id="s", candidate_id="c", evaluation_id="e-1", gate=Gate.G0_STATIC,
        verdict=Verdict.FAILED, reason="r",
    )  # fmt: skip
    records.keep(event)
    assert Records(tmp_path).find("e-1") == event
    assert records.find("e-2") is None
    (tmp_path / "e-1.json").write_bytes((tmp_path / "e-1.json").read_bytes()[:40])
    assert records.find("e-1") is None, "a record that was cut off is made anew"
    records.keep(event.model_copy(update={"evaluation_id": "../outside"}))
    assert not (tmp_path.parent / "outside.json").exists()


def test_the_last_cache_is_read_in_bytes(tmp_path) -> None:
    for index, size in enumerate(("64K", "512K", "8192K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_cache(tmp_path) == 8 << 20
