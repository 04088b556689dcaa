"""`polymorph plan`: what it takes, and what it says."""

from pathlib import Path

import pytest

from polymorph.embedded.cli import main
from polymorph.embedded.folder import StartRefused
from polymorph.embedded.plan import revision_in, told
from polymorph.events.requests import PlanAnswer
from polymorph.events.values import EngineSettings, SettingChange, Way


def written(folder: Path, text: str) -> Path:
    path = folder / "asked.yaml"
    path.write_text(text)
    return path


def test_settings_alone_or_a_whole_revision(tmp_path: Path) -> None:
    alone = revision_in(written(tmp_path, "max_num_seqs: 16\nscheduling_policy: priority\n"))
    assert alone.engine == EngineSettings(max_num_seqs=16, scheduling_policy="priority")
    whole = revision_in(written(tmp_path, '{"revision": "r-1", "engine": {"block_size": 32}, "slots": []}'))
    assert (whole.revision, whole.slots) == ("r-1", ())
    unknown = revision_in(written(tmp_path, "blocks: 3")).engine
    assert unknown is not None
    assert unknown.model_extra == {"blocks": 3}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- 1", "holds no mapping: name settings"),
        ("a: [", "cannot be read"),
        ("max_num_seqs: many", "max_num_seqs: Input should be a valid integer"),
    ],
)
def test_what_is_neither_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(StartRefused, match=reason):
        revision_in(written(tmp_path, text))


def test_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "max_num_seqs: 16")
    assert main(["plan", str(path), "--data", str(tmp_path / "data")]) == 2
    assert "name a server with --nats" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none")]) == 2


def test_a_plan_is_told_in_lines() -> None:
    answer = PlanAnswer(
        ok=True,
        way=Way.ENGINE,
        why="block_size null -> 32: a new engine",
        changes=(SettingChange(name="block_size", now="null", wanted="32", live=False),),
        recapture=True,
        cache_reset=True,
        inverse=EngineSettings(max_num_seqs=8),
    )
    assert told("w1", answer) == [
        "w1: engine: block_size null -> 32: a new engine",
        "  block_size: null -> 32",
        "  graphs are built anew, the prefix cache is lost",
        '  taken back by {"max_num_seqs": 8}',
    ]
    assert told("w2", PlanAnswer(ok=False, reason="no")) == ["w2: would refuse: no"]
