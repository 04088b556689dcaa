"""What the committed weights have learnt, on a slice of held-out text that every machine with Python has."""

import itertools
import json
from pathlib import Path

import pytest

SLICE = 2_048


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe", "tiny-draft"])
@pytest.mark.parametrize("domain", ["code", "structured"])
def test_held_out_loss_beats_the_unigram_model_clearly(name: str, domain: str) -> None:
    import measure
    import small_models
    import small_tokenizer
    import tokens

    model = small_models.MODELS[name]
    tokenizer = small_tokenizer.load(model.folder)
    rows = measure.windows(tokens.domain_ids(tokenizer, domain, "heldout", limit=40_000), SLICE)
    training = tokens.domain_ids(tokenizer, domain, "train", limit=400_000)
    baseline = measure.unigram_loss(measure.unigram(training, len(tokenizer)), rows)
    loss, _ = measure.read(measure.load(model), rows)
    assert loss < baseline - 0.7


def test_the_draft_agrees_with_its_target_more_than_chance() -> None:
    import measure
    import small_models
    import small_tokenizer
    import tokens

    tokenizer = small_tokenizer.load(small_models.DENSE.folder)
    rows = measure.windows(tokens.domain_ids(tokenizer, "structured", "heldout", limit=40_000), SLICE)
    target, draft = (
        measure.read(measure.load(model), rows)[1] for model in (small_models.DENSE, small_models.DRAFT)
    )
    assert 0.3 < (target == draft).mean() < 1.0


def test_no_expert_takes_all_tokens_and_most_take_some() -> None:
    import measure
    import small_models
    import small_tokenizer
    import tokens

    tokenizer = small_tokenizer.load(small_models.MOE.folder)
    rows = measure.windows(tokens.domain_ids(tokenizer, "code", "heldout", limit=40_000), SLICE)
    for layer in measure.expert_load(measure.load(small_models.MOE), rows):
        assert sum(layer) == pytest.approx(1.0, abs=0.001)
        assert max(layer) < 0.5
        assert sum(share > 0.01 for share in layer) >= 4


def test_the_figures_of_the_readme_are_the_measured_ones(models_folder: Path) -> None:
    import measure

    found = json.loads((models_folder / "measured.json").read_text())
    assert measure.figures(found) in (models_folder / "README.md").read_text()
    for name, steps in found["steps"].items():
        assert json.loads((models_folder / name / "training.json").read_text())["steps"] == steps


def test_new_figures_replace_the_old_ones_and_nothing_else(models_folder: Path) -> None:
    import measure

    text = (models_folder / "README.md").read_text()
    found = json.loads((models_folder / "measured.json").read_text())
    later = measure.with_figures(text, {**found, "date": "2031-01-02"})
    assert "2031-01-02" in later
    assert measure.with_figures(later, found) == text
    with pytest.raises(ValueError, match="must hold"):
        measure.with_figures("no marks here", found)


def test_rows_spread_over_the_text_and_never_overlap() -> None:
    import measure
    import numpy as np

    rows = measure.windows(np.arange(10_000, dtype=np.uint16), 2_048).numpy()
    assert rows.shape == (8, 257)
    assert all(later[0] > earlier[-1] for earlier, later in itertools.pairwise(rows))
    with pytest.raises(ValueError, match="too few"):
        measure.windows(np.arange(100, dtype=np.uint16), 2_048)
