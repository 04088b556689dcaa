"""Other weights for a draft model: what is refused beforehand, and what the answer tells."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from polymorph.engine import draft

CONFIG = {"architectures": ["A"], "hidden_size": 4, "vocab_size": 8}


def folder(path: Path, **changes: Any) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "model.safetensors").touch()
    return str(path)


def worker(held: str) -> Any:
    config = SimpleNamespace(model=held)
    drafter = SimpleNamespace(
        model=torch.nn.Linear(4, 4), speculative_config=SimpleNamespace(draft_model_config=config)
    )
    return SimpleNamespace(model_runner=SimpleNamespace(drafter=drafter))


def test_weights_that_changed_show_in_the_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = worker(folder(tmp_path / "a"))

    def reload(_: Any, model: Any, config: Any, path: str) -> None:
        with torch.no_grad():
            model.weight.add_(1.0)
        config.model = path

    monkeypatch.setattr(draft, "_reload", reload)
    answer = draft.polymorph_draft_weights(engine, folder(tmp_path / "b"))
    assert answer["ok"]
    assert answer["before"] != answer["after"]
    monkeypatch.setattr(draft, "_reload", lambda *_: None)
    answer = draft.polymorph_draft_weights(engine, str(tmp_path / "a"))
    assert answer["before"] == answer["after"]


def test_what_cannot_be_is_refused_and_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "_reload", lambda *_: pytest.fail("it was loaded"))
    engine = worker(folder(tmp_path / "a"))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(CONFIG))
    for path, reason in (
        (folder(tmp_path / "wide", hidden_size=8), "hidden_size 8, the draft model that runs has 4"),
        (str(tmp_path / "bare"), "holds no weights"),
        (str(tmp_path / "none"), "is no model folder"),
    ):
        answer = draft.polymorph_draft_weights(engine, path)
        assert not answer["ok"]
        assert reason in answer["reason"]
    assert draft.polymorph_draft_weights(SimpleNamespace(), "x")["reason"] == "this engine has no draft model"


def test_it_is_installed_where_there_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class WorkerBase: ...

    module = ModuleType("vllm.v1.worker.worker_base")
    module.WorkerBase = WorkerBase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", module)
    draft.install()
    assert hasattr(WorkerBase, draft.DRAFT_CALL)
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.worker_base")
    draft.install()
