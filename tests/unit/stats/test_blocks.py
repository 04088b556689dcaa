import numpy as np
import pytest

from polymorph.stats.agreement import Agreement, agreement, no_worse
from polymorph.stats.blocks import median_ratio, paired_ratio


def _block_pairs(rng: np.random.Generator, truth: float, blocks: int) -> tuple[list[float], list[float]]:
    shared = rng.normal(100, 15, blocks).clip(40)
    noise = rng.normal(1, 0.02, (2, blocks))
    return (shared * noise[0]).tolist(), (shared * truth * noise[1]).tolist()


@pytest.mark.parametrize("blocks", [6, 16])
def test_an_a_a_interval_covers_one(blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    covered = 0
    for _ in range(400):
        ratio = paired_ratio(*_block_pairs(rng, 1.0, blocks), rng)
        covered += ratio.low <= 1.0 <= ratio.high
    assert 0.92 < covered / 400 <= 0.99


def test_pairing_takes_out_what_blocks_share() -> None:
    rng = np.random.default_rng(3)
    ratio = paired_ratio(*_block_pairs(rng, 1.1, 8), rng)
    assert ratio.low > 1.05
    assert ratio.high < 1.15


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0])])
def test_blocks_that_cannot_be_paired_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="blocks"):
        paired_ratio(a, b, np.random.default_rng(0))
    with pytest.raises(ValueError, match="blocks"):
        median_ratio(a, b)


def test_the_median_of_pairs_stands_where_some_blocks_take_twice_as_long() -> None:
    rng = np.random.default_rng(5)
    covered, widths = 0, []
    for _ in range(400):
        a, b = (np.asarray(each) for each in _block_pairs(rng, 1.05, 100))
        slow = 1 + (rng.random((2, 100)) < 0.1) * rng.exponential(1.5, (2, 100))
        ratio = median_ratio((a * slow[0]).tolist(), (b * slow[1]).tolist())
        covered += ratio.low <= 1.05 <= ratio.high
        widths.append(ratio.high - ratio.low)
    assert 0.93 < covered / 400 <= 0.99
    assert np.median(widths) < 0.02


def test_the_median_of_few_pairs_is_given_with_their_range() -> None:
    ratio = median_ratio([1.0, 1.0, 1.0], [3.0, 1.0, 2.0])
    assert [ratio.low, ratio.point, ratio.high] == pytest.approx([1.0, 2.0, 3.0])
    six = median_ratio([1.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert [six.low, six.high] == pytest.approx([1.0, 6.0]), "both are outside in 2 of 64"
    nine = median_ratio([1.0] * 9, [float(each) for each in range(1, 10)])
    assert [nine.low, nine.high] == pytest.approx([2.0, 8.0]), "as in textbooks"
    many = median_ratio([1.0] * 2000, [float(each) for each in range(1, 2001)])
    assert [many.low, many.high] == pytest.approx([956.0, 1045.0])


def test_agreement_counts_equal_outputs_and_where_others_part() -> None:
    found = agreement([[1, 2, 3], [4, 5, 6], [7, 8]], [[1, 2, 3], [4, 9, 6], [7, 8, 9]])
    assert found.share == pytest.approx(1 / 3)
    assert found.first_difference == pytest.approx(1.5)


def test_the_yardstick_is_the_incumbents_agreement_with_itself() -> None:
    def share(equal: int) -> "object":
        return agreement([[1]] * 8, [[1]] * equal + [[2]] * (8 - equal))

    assert no_worse(share(4), share(4))  # type: ignore[arg-type]
    assert no_worse(share(3), share(4))  # type: ignore[arg-type]
    assert not no_worse(share(1), share(4))  # type: ignore[arg-type]


def test_always_equal_over_many_requests_leaves_no_slack() -> None:
    same = agreement([[1]] * 24, [[1]] * 24)
    one_off = agreement([[1]] * 24, [[1]] * 23 + [[2]])
    assert not no_worse(one_off, same)


def test_no_slack_makes_an_agreement_of_none_pass() -> None:
    assert not no_worse(Agreement(8, 0, 3.0, 16), Agreement(8, 1, 3.0, 16))
    assert not no_worse(Agreement(8, 0, 3.0, 16), Agreement(8, 0, 3.0, 16))
    assert no_worse(Agreement(8, 1, 3.0, 16), Agreement(8, 1, 3.0, 16))


def test_outputs_that_part_clearly_earlier_do_not_pass() -> None:
    own = Agreement(8, 6, 9.0, 16)
    assert no_worse(Agreement(8, 6, 5.0, 16), own)
    assert not no_worse(Agreement(8, 6, 4.0, 16), own)
    assert not no_worse(Agreement(8, 7, 0.0, 16), Agreement(8, 8, None, 16)), "at the first token"
    assert no_worse(Agreement(8, 7, 9.0, 16), Agreement(8, 8, None, 16)), "one flip is no evidence"
    assert agreement([[1, 2]], [[1, 2]]).tokens == 2
