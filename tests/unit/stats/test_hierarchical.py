import math

import numpy as np
import pytest

from polymorph.events.values import Ratio
from polymorph.stats.hierarchical import log_ratio, speedup, spread
from polymorph.stats.margin import Call, judge
from polymorph.stats.student import t975


def _trial(rng: np.random.Generator, truth: float, *, load_sd: float = 0.009) -> Ratio:
    """Five processes of five loads of six pairs; each arm of each load has a bias of its own."""
    processes = []
    for _ in range(5):
        drift = rng.normal(0, 0.004)
        loads = []
        for _ in range(5):
            bias = rng.normal(0, load_sd) - rng.normal(0, load_sd)
            loads.append((math.log(truth) + drift + bias + rng.normal(0, 0.02, 6)).tolist())
        processes.append(loads)
    return speedup(processes)


def test_an_a_a_comparison_differs_in_about_one_of_twenty_trials() -> None:
    rng = np.random.default_rng(7)
    trials = [_trial(rng, 1.0) for _ in range(800)]
    different = sum(not ratio.low <= 1.0 <= ratio.high for ratio in trials) / len(trials)
    assert 0.025 < different < 0.08


def test_beyond_the_margin_an_a_a_comparison_never_wins() -> None:
    rng = np.random.default_rng(8)
    wins = sum(judge(_trial(rng, 1.0), margin=0.01, widest=0.1) is Call.BETTER for _ in range(800))
    assert wins <= 4


def test_pairs_taken_as_independent_would_be_overconfident() -> None:
    """The reason for the hierarchy: the same data as one flat sample differs far more often than 5 %."""
    rng = np.random.default_rng(9)
    false = 0
    for _ in range(300):
        flat = [
            value for _ in range(5) for value in (rng.normal(0, 0.0127) + rng.normal(0, 0.005, 30)).tolist()
        ]
        mean, sd = float(np.mean(flat)), float(np.std(flat, ddof=1))
        false += abs(mean) > 1.98 * sd / math.sqrt(len(flat))
    assert false / 300 > 0.3


def test_a_real_gain_is_found_and_covered() -> None:
    rng = np.random.default_rng(10)
    trials = [_trial(rng, 1.2) for _ in range(300)]
    assert sum(ratio.low <= 1.2 <= ratio.high for ratio in trials) / len(trials) > 0.9
    assert all(judge(ratio, margin=0.01, widest=0.1) is Call.BETTER for ratio in trials)


def test_an_interruption_of_one_pair_does_not_move_the_point() -> None:
    quiet = [[[0.1, 0.1, 0.1]] * 2] * 3
    struck = [[[0.1, 0.1, 2.0], [0.1, 0.1, 0.1]], *quiet[1:]]
    assert speedup(struck).point == pytest.approx(speedup(quiet).point)


def test_spread_tells_the_levels_apart() -> None:
    found = spread([[[0.0, 0.2], [0.0, 0.2]], [[1.0, 1.2], [1.0, 1.2]]])
    assert found.between_processes > found.within_load > found.between_loads == 0


def test_one_process_gives_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        speedup([[[0.1]]])


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        log_ratio(1.0, seconds)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (4, 2.776), (11, 2.2010), (30, 2.0423), (1000, 1.9623)]
)
def test_quantiles_match_the_table(degrees: int, expected: float) -> None:
    assert t975(degrees) == pytest.approx(expected, abs=2e-3)


def test_the_margin_rule_has_three_answers() -> None:
    def ratio(low: float, high: float) -> Ratio:
        return Ratio(point=(low + high) / 2, low=low, high=high)

    assert judge(ratio(1.02, 1.4), margin=0.01, widest=0.05) is Call.BETTER
    assert judge(ratio(1.00, 1.02), margin=0.01, widest=0.05) is Call.NOT_BETTER
    assert judge(ratio(0.90, 1.30), margin=0.01, widest=0.05) is Call.UNDECIDED
    assert judge(ratio(0.50, 0.90), margin=0.01, widest=0.05) is Call.NOT_BETTER
