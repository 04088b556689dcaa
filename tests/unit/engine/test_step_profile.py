"""Where the time of steps goes, told from the operators that torch itself calls."""

import torch

from polymorph.engine.dispatcher.ops import load
from polymorph.engine.profile import OTHER, REST, Regime, StepProfile


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _step(profile: StepProfile, hands: Hands, tokens: int, seconds: float) -> None:
    profile.begin(tokens)
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    torch.sort(torch.ones(1000))
    hands.now += seconds
    profile.end()


def test_every_step_is_counted_and_some_are_sampled() -> None:
    hands = Hands()
    profile = StepProfile(load(), 10.0, hands)
    for _ in range(25):
        _step(profile, hands, 3, 1.0)
    regime = profile.regimes[4]
    assert (regime.steps, regime.ns) == (25, 25 * 10**9)
    assert regime.sampled_steps == 2
    assert regime.families["linear"] > 0
    assert regime.families["sampling"] > 0
    assert regime.families[OTHER] > 0
    assert sum(regime.families.values()) == regime.sampled_ns


def test_nothing_is_observed_outside_a_sampled_step() -> None:
    hands = Hands()
    profile = StepProfile(load(), 0.0, hands)
    _step(profile, hands, 1, 1.0)
    assert profile.regimes[1].sampled_steps == 0
    profile = StepProfile(load(), 1.0, hands)
    hands.now += 2
    profile.begin(1)
    profile.begin(1)  # the step before never ended
    profile.end()
    assert profile.regimes[1].steps == 1


def test_time_that_no_operator_tells_is_the_rest() -> None:
    regime = Regime()
    operators = {"polymorph::linear": {"calls": 1, "ns": 60}, "aten::add": {"calls": 1, "ns": 10}}
    regime.add_sample({"wall_ns": 100, "operators": operators})
    assert regime.families == {"linear": 60, OTHER: 10, REST: 30}


def test_a_call_within_another_counts_once() -> None:
    import json

    ops = load()
    ops.profile_start()
    torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8))
    document = json.loads(ops.profile_stop())
    assert document["operators"]["aten::linear"]["calls"] == 1
    assert sum(spent["ns"] for spent in document["operators"].values()) <= document["wall_ns"]
