import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def ids() -> Any:
    import numpy as np
    import tokens

    rng = np.random.default_rng(0)
    return {domain: rng.integers(3, 40, 4_000).astype(np.uint16) for domain in tokens.WEIGHTS}


def test_a_batch_depends_on_seed_and_step_alone(ids: Any) -> None:
    import tokens

    first = tokens.batch(ids, 4, 33, seed=1, step=5)
    assert (first == tokens.batch(ids, 4, 33, seed=1, step=5)).all()
    assert (first != tokens.batch(ids, 4, 33, seed=1, step=6)).any()
    assert (first != tokens.batch(ids, 4, 33, seed=2, step=5)).any()


def test_a_training_cut_in_two_ends_like_one_in_a_piece(
    ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import small_models
    import train

    monkeypatch.setattr(train, "CACHE", tmp_path)
    monkeypatch.setattr(train, "CONTEXT", 16)
    monkeypatch.setattr(train, "ROWS", 1)
    short = replace(small_models.DRAFT, steps=3, origin=None, distilled=False)
    whole = train.Training(short, ids, "whole")
    whole.run(deadline=float("inf"))
    cut = train.Training(short, ids, "cut")
    with pytest.raises(train.OutOfTime):
        cut.run(deadline=0.0)
    assert cut.step == 1
    again = train.Training(short, ids, "cut")
    again.resume()
    assert again.step == 1
    again.run(deadline=float("inf"))
    ours, theirs = again.network.state_dict(), whole.network.state_dict()
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    import small_models
    import train

    rates = [train.rate(small_models.DENSE, step) for step in range(small_models.DENSE.steps + 1)]
    assert rates[0] < rates[20] < max(rates) == small_models.DENSE.learning_rate
    assert rates[-1] == 0.0
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[40:]))


def test_distillation_is_nothing_between_equals_and_more_between_others() -> None:
    import torch
    import train

    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    assert float(train.distillation(logits, logits)) == pytest.approx(0.0, abs=1e-6)
    assert float(train.distillation(logits, logits.flip(-1))) > 0.1
