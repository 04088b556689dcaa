"""What is searched follows from the shares in the window, not from a list."""

import pytest

from polymorph.compiler.domain.search_target import plan, spans
from polymorph.compiler.domain.search_workload import m_weights, workload
from polymorph.events.values import Operation


def constant(definition, min_m, max_m):
    return 0.5


def test_span_is_the_decode_range_where_decode_takes_the_time():
    found = spans({"1": 0.1, "4": 0.3, "8": 0.5, "512": 0.1})
    assert [(s.min_m, s.max_m, round(s.weight, 6)) for s in found] == [(1, 8, 0.9)]


def test_prefill_and_decode_are_two_spans_heaviest_first():
    found = spans({"8": 0.4, "512": 0.6})
    assert [(s.min_m, s.max_m) for s in found] == [(257, 512), (5, 8)]


def test_rare_buckets_are_left_out_and_close_neighbours_join():
    assert [(s.min_m, s.max_m) for s in spans({"4": 0.85, "8": 0.1, "16": 0.01, "2048": 0.04})] == [(3, 8)]


def test_no_span_is_wider_than_one_kernel_can_serve():
    evenly = {str(2**n): 0.1 for n in range(10)}
    assert all(s.max_m <= 16 * max(s.min_m, 1) * 2 for s in spans(evenly))
    assert len(spans(evenly)) > 1


def test_an_unknown_bucket_is_refused_by_name():
    with pytest.raises(ValueError, match="'7'"):
        spans({"7": 1.0})


def test_no_time_known_is_no_span():
    assert spans({}) == ()


def test_targets_are_ordered_by_gain_and_small_gains_left_out(lab):
    seen = lab.window({"8": 1.0}, {lab.DOWN: 0.2, lab.GATE_UP: 0.4, lab.HEAD: 0.005})
    targets = plan(seen, constant, least_gain=0.01, limit=6, largest_m=8192)
    assert [t.definition for t in targets] == [lab.GATE_UP, lab.DOWN]
    assert targets[0].gain == pytest.approx(0.4 * 1.0 * 0.5)


def test_reversed_shares_reverse_the_search(lab):
    forward = plan(
        lab.window({"8": 1.0}, {lab.DOWN: 0.1, lab.HEAD: 0.5}),
        constant,
        least_gain=0,
        limit=1,
        largest_m=8192,
    )
    backward = plan(
        lab.window({"8": 1.0}, {lab.DOWN: 0.5, lab.HEAD: 0.1}),
        constant,
        least_gain=0,
        limit=1,
        largest_m=8192,
    )
    assert forward[0].definition == lab.HEAD
    assert backward[0].definition == lab.DOWN


def test_ranges_end_where_nothing_could_be_confirmed(lab):
    seen = lab.window({"16": 0.3, "32": 0.2, "64": 0.1, "1024": 0.4}, {lab.GATE_UP: 0.5})
    found = plan(seen, constant, least_gain=0, limit=6, largest_m=32)
    assert [(t.min_m, t.max_m, round(t.span_weight, 6)) for t in found] == [(9, 32, 0.5)]


def test_an_operations_own_m_counts_where_the_workers_tell_it(lab):
    """The output layer of a prefill step of 64 tokens computes one row."""
    seen = lab.window({"1": 0.3, "64": 0.7}, {lab.HEAD: 0.5})
    told = (Operation(definition=lab.HEAD, share=0.5, by_m={"1": 0.45, "64": 0.05}),)
    targets = plan(
        seen.model_copy(update={"operations": told}), constant, least_gain=0, limit=1, largest_m=8192
    )
    assert [(t.min_m, t.max_m, round(t.gain, 6)) for t in targets] == [(1, 1, 0.225)]
    document = workload("search-1", targets[0], seen.model_copy(update={"operations": told}))
    assert document.x_polymorph.model_dump()["m_weights"] == {"1": 1.0}


def test_headroom_outweighs_share(lab):
    seen = lab.window({"8": 1.0}, {lab.DOWN: 0.3, lab.HEAD: 0.4})
    room = {lab.DOWN: 0.5, lab.HEAD: 0.1}
    targets = plan(
        seen, lambda definition, low, high: room[definition], least_gain=0, limit=6, largest_m=8192
    )
    assert targets[0].definition == lab.DOWN


def test_workload_holds_weights_of_its_range_and_what_a_replay_needs(lab):
    seen = lab.window({"4": 0.2, "8": 0.6, "512": 0.2}, {lab.GATE_UP: 0.4}, prompt=321)
    target = plan(seen, constant, least_gain=0, limit=1, largest_m=8192)[0]
    document = workload("search-1", target, seen)
    extras = document.x_polymorph.model_dump()
    assert extras["m_weights"] == {"4": 0.25, "8": 0.75}
    assert document.axes == {"M": 8}
    assert extras["replay"]["prompt_tokens"]["p90"] == 321
    assert extras["replay"]["concurrency"] == 4.0
    assert workload("search-1", target, seen).digest() == document.digest()


def test_weights_of_an_unseen_range_fall_on_its_upper_bucket(lab):
    assert m_weights({"8": 1.0}, 17, 64) == {"64": 1.0}
