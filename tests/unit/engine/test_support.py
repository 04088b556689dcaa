"""Features that slots stand beside, told from vLLM's configuration: each supported or refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from polymorph.engine.support import Verdict, features, refused


def config(**changes: Any) -> Any:
    model = {"quantization": None, "is_moe": False, "is_multimodal_model": False, "runner_type": "generate"}
    made = {"lora_config": None, "kv_transfer_config": None, "ec_transfer_config": None}
    own = {name: changes.pop(name) for name in list(changes) if name in model}
    return SimpleNamespace(model_config=SimpleNamespace(**model | own), **made | changes)


def test_a_plain_engine_has_none() -> None:
    assert features(config()) == ()
    assert refused(()) is None


@pytest.mark.parametrize(
    ("changes", "name", "verdict", "word"),
    [
        ({"quantization": "fp8"}, "quantised linear", Verdict.NATIVE, "quantised by fp8"),
        ({"quantization": "compressed-tensors"}, "quantised linear", Verdict.NATIVE, "INT8"),
        ({"lora_config": object()}, "LoRA", Verdict.SUPPORTED, "adds the adapters'"),
        ({"lora_config": object(), "is_moe": True}, "LoRA", Verdict.REFUSED, "experts"),
        ({"is_multimodal_model": True}, "multimodal", Verdict.REFUSED, "encoders"),
        (
            {"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")},
            "disaggregated prefill",
            Verdict.REFUSED,
            "by NixlConnector",
        ),
        (
            {"ec_transfer_config": SimpleNamespace(ec_connector="ECExample")},
            "disaggregated prefill",
            Verdict.REFUSED,
            "by ECExample",
        ),
        ({"runner_type": "pooling"}, "pooling", Verdict.REFUSED, "generating tokens"),
    ],
)
def test_each_is_named_with_its_reason(
    changes: dict[str, Any], name: str, verdict: Verdict, word: str
) -> None:
    (found,) = features(config(**changes))
    assert (found.name, found.verdict) == (name, verdict)
    assert word in found.reason
    assert found.told().startswith(f"{verdict}: ")
    assert (refused((found,)) is found) == (verdict is Verdict.REFUSED)


def test_several_at_once_are_all_told() -> None:
    used = features(config(quantization="awq", lora_config=object(), runner_type="pooling"))
    assert [feature.name for feature in used] == ["quantised linear", "LoRA", "pooling"]
    assert refused(used) is used[2]
