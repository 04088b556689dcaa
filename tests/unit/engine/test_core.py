"""The calls that a scheduler's process answers, on the attributes of vLLM's EngineCore that they need."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polymorph.engine import core as calls
from polymorph.engine.knobs import KNOBS


def core(**absent: bool) -> Any:
    config = SimpleNamespace(
        max_num_seqs=16,
        max_num_batched_tokens=256,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=0,
    )
    scheduler = SimpleNamespace(
        scheduler_config=config,
        max_num_active_reqs=8,
        max_num_scheduled_tokens=128,
        adaptive_long_prefill_threshold=False,
        scheduler_reserve_full_isl=True,
        policy=SimpleNamespace(value="fcfs"),
        waiting=[],
        current_step=5,
        block_size=16,
        requests={},
    )
    for name in absent:
        delattr(scheduler, name)
    return SimpleNamespace(
        scheduler=scheduler,
        vllm_config=SimpleNamespace(
            scheduler_config=config,
            cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=9, enable_prefix_caching=True),
            model_config=SimpleNamespace(enforce_eager=True, max_model_len=512),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            speculative_config=None,
            additional_config={"polymorph": "linear-1"},
        ),
    )


def test_settings_are_read_from_where_the_scheduler_reads_them() -> None:
    told = calls.polymorph_settings(core())
    assert told["settings"] == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "scheduler_reserve_full_isl": True,
        "scheduling_policy": "fcfs",
    }
    assert told["envelope"] == {"max_num_seqs": 16, "max_num_batched_tokens": 256, "smallest_batch": 1}
    assert (told["missing"], told["salt"], told["step"]) == ({}, None, 5)
    assert told["config"]["block_size"] == 16
    assert told["config"]["speculative_method"] == "none"


def test_all_is_set_or_nothing() -> None:
    engine = core()
    answer = calls.polymorph_set(engine, {"max_num_seqs": 16, "long_prefill_token_threshold": 32})
    assert answer["ok"]
    assert answer["before"] == {"max_num_seqs": 8, "long_prefill_token_threshold": 0}
    assert engine.scheduler.max_num_active_reqs == 16
    assert engine.scheduler.scheduler_config.long_prefill_token_threshold == 32
    refused = calls.polymorph_set(engine, {"max_num_seqs": 2, "max_num_batched_tokens": 257})
    assert refused["reason"] == (
        "max_num_batched_tokens=257: use 2 (a token for each sequence) to 256, the engine's envelope"
    )
    assert refused["settings"]["max_num_seqs"] == 16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_num_seqs": 17}, "use 1 to 16"),
        ({"max_num_seqs": 0}, "use 1 to 16"),
        ({"max_num_seqs": True}, "use 1 to 16"),
        ({"max_num_seqs": "4"}, "use 1 to 16"),
        ({"max_num_batched_tokens": 7}, "use 8"),
        ({"long_prefill_token_threshold": -1}, "or 0 for none"),
        ({"long_prefill_token_threshold_adaptive": 1}, "true or false"),
        ({"scheduling_policy": "lifo"}, "fcfs or priority"),
        ({"block_size": 32, "kv_gib": 1}, "block_size, kv_gib cannot be set live; max_num_seqs, "),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    answer = calls.polymorph_set(core(), changes)
    assert not answer["ok"]
    assert reason in answer["reason"]


def test_without_chunks_a_batch_holds_the_longest_prompt() -> None:
    engine = core()
    engine.scheduler.scheduler_config.enable_chunked_prefill = False
    assert "use 512" in calls.polymorph_set(engine, {"max_num_batched_tokens": 200})["reason"]


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("max_num_active_reqs", "max_num_seqs"),
        ("adaptive_long_prefill_threshold", "long_prefill_token_threshold_adaptive"),
        ("waiting", "scheduling_policy"),
    ],
)
def test_a_changed_vllm_loses_that_setting_and_no_other(attribute: str, name: str) -> None:
    engine = core(**{attribute: True})
    assert set(calls.polymorph_settings(engine)["missing"]) == {name}
    assert f"{name} cannot be set in this vLLM" in calls.polymorph_set(engine, {name: 1})["reason"]
    assert calls.polymorph_set(engine, {"scheduler_reserve_full_isl": False})["ok"]


def test_a_salt_without_its_hooks_is_refused() -> None:
    answer = calls.polymorph_salt(core(), "r")
    assert not answer["ok"]
    assert "preprocess_add_request" in answer["reason"]


def test_it_is_installed_where_there_is_an_engine_core_and_changes_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class EngineCore:
        def add_request(self) -> None: ...

    before = dict(vars(EngineCore))
    module = ModuleType("vllm.v1.engine.core")
    module.EngineCore = EngineCore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    calls.install()
    calls.install()
    added = {name for name in vars(EngineCore) if name not in before and not name.startswith("__")}
    assert added == {calls.SETTINGS_CALL, calls.SET_CALL, calls.SALT_CALL}
    assert vars(EngineCore)["add_request"] is before["add_request"]
    monkeypatch.delitem(sys.modules, "vllm.v1.engine.core")
    calls.install()


def test_every_knob_is_a_setting_of_the_contract() -> None:
    from polymorph.events.values import EngineSettings

    assert set(KNOBS) <= set(EngineSettings.model_fields)
