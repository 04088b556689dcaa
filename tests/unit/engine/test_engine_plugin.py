"""What vLLM loads in each process leaves it alone where it is told to, and where a class is not what it was."""

import sys
from types import ModuleType

import pytest

from polymorph.engine import core, draft, plugin

CORE, BASE = "vllm.v1.engine.core", "vllm.v1.worker.worker_base"


def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    made = ModuleType(CORE), ModuleType(BASE)
    for module in made:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_stock_vllm_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, worker = modules(monkeypatch)
    engine.EngineCore, worker.WorkerBase = type("EngineCore", (), {}), type("WorkerBase", (), {})  # type: ignore[attr-defined]
    monkeypatch.setenv("POLYMORPH_DISABLE", "1")
    plugin.register()
    assert not hasattr(engine.EngineCore, core.SETTINGS_CALL)
    assert not hasattr(worker.WorkerBase, draft.DRAFT_CALL)
    monkeypatch.setenv("POLYMORPH_DISABLE", "linear")
    plugin.register()
    plugin.register()
    assert hasattr(engine.EngineCore, core.SETTINGS_CALL)
    assert hasattr(worker.WorkerBase, draft.DRAFT_CALL)


def test_a_class_that_is_gone_costs_its_own_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, worker = modules(monkeypatch)
    worker.WorkerBase = type("WorkerBase", (), {})  # type: ignore[attr-defined]
    monkeypatch.delenv("POLYMORPH_DISABLE", raising=False)
    plugin.register()
    assert hasattr(worker.WorkerBase, draft.DRAFT_CALL)
