"""Definitions: names, references, and documents of FlashInfer-Bench's schema."""

import json

import pytest
import torch

from polymorph.kernels.definitions import (
    definition_named,
    fused_add_rms_norm_definition,
    linear_definition,
    rms_norm_definition,
)
from polymorph.kernels.schema import Definition, Solution, Trace, TraceStatus, Workload


def reference(definition: Definition):
    scope: dict = {}
    exec(compile(definition.reference, definition.name, "exec"), scope)  # noqa: S102
    return scope["run"]


def test_linear_is_torchs_linear() -> None:
    definition = linear_definition(5, 3, "float32")
    assert definition.name == "gemm_n5_k3_f32"
    x, weight, bias = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5)
    run = reference(definition)
    torch.testing.assert_close(run(x, weight), torch.nn.functional.linear(x, weight))
    torch.testing.assert_close(run(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    assert run(x.double(), weight.double()).dtype is torch.float64


def test_rms_norm_is_torchs() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    run = reference(rms_norm_definition(8, "float32"))
    torch.testing.assert_close(run(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (8,), weight, 1e-5))
    assert run(x.bfloat16(), weight.bfloat16(), torch.tensor([1e-5])).dtype is torch.bfloat16


def test_fused_add_norm_gives_both_outputs() -> None:
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    y, summed = reference(fused_add_rms_norm_definition(8, "float32"))(x, residual, weight, 1e-5)
    torch.testing.assert_close(summed, x + residual)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x + residual, (8,), weight, 1e-5))


def test_costs_are_expressions_of_the_axes() -> None:
    definition = linear_definition(960, 576, "bfloat16")
    axes = {"M": 2, "N": 960, "K": 576}
    assert eval(definition.x_polymorph.flops, {}, axes) == 2 * 2 * 960 * 576  # noqa: S307
    assert eval(definition.x_polymorph.bytes, {}, axes) == 2 * (2 * 576 + 960 * 576 + 2 * 960)  # noqa: S307
    assert definition.x_polymorph.packed_inputs == ("weight",)


def test_definitions_survive_json() -> None:
    for definition in (
        linear_definition(8, 8, "float32"),
        rms_norm_definition(8, "bfloat16"),
        fused_add_rms_norm_definition(8, "float32"),
    ):
        again = Definition.model_validate_json(definition.canonical())
        assert again == definition
        assert again.digest() == definition.digest()


def test_a_name_tells_its_definition() -> None:
    for definition in (
        linear_definition(960, 576, "float32"),
        rms_norm_definition(576, "bfloat16"),
        fused_add_rms_norm_definition(576, "float32"),
    ):
        assert definition_named(definition.name) == definition
    with pytest.raises(ValueError, match="names no operation"):
        definition_named("attention_h8")


def test_bad_axes_and_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match="axis N is 0"):
        linear_definition(0, 8, "float32")
    with pytest.raises(ValueError, match="'int8' has no kernels"):
        rms_norm_definition(8, "int8")  # type: ignore[arg-type]


def test_flashinfer_bench_documents_load_unchanged() -> None:
    definition = {
        "name": "rmsnorm_h128",
        "op_type": "rmsnorm",
        "description": "Root mean square normalisation.",
        "tags": ["status:verified", "model:some"],
        "axes": {
            "batch_size": {"type": "var", "description": "tokens"},
            "hidden_size": {"type": "const", "value": 128},
        },
        "inputs": {
            "hidden_states": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"},
            "weight": {"shape": ["hidden_size"], "dtype": "bfloat16"},
            "eps": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"output": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"}},
        "constraints": ["batch_size > 0"],
        "reference": "import torch\n\ndef run(hidden_states, weight, eps):\n    return hidden_states\n",
    }
    solution = {
        "name": "rmsnorm_triton",
        "definition": "rmsnorm_h128",
        "author": "someone",
        "description": "A Triton kernel.",
        "spec": {
            "language": "triton",
            "target_hardware": ["NVIDIA_H100"],
            "entry_point": "main.py::run",
            "dependencies": [],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": "def run(): pass\n"}],
    }
    workload = {
        "axes": {"batch_size": 7},
        "inputs": {
            "hidden_states": {"type": "random"},
            "weight": {"type": "safetensors", "path": "w.safetensors", "tensor_key": "w"},
            "eps": {"type": "scalar", "value": 1e-6},
        },
        "uuid": "6b0d",
    }
    trace = {
        "definition": "rmsnorm_h128",
        "workload": workload["uuid"],
        "solution": "rmsnorm_triton",
        "evaluation": {
            "status": "PASSED",
            "log": "",
            "timestamp": "2025-10-01T00:00:00",
            "environment": {"hardware": "NVIDIA_H100", "libs": {"torch": "2.8"}},
            "correctness": {"max_relative_error": 0.0, "max_absolute_error": 0.0},
            "performance": {"latency_ms": 0.1, "reference_latency_ms": 0.2, "speedup_factor": 2.0},
        },
    }
    kinds = ((Definition, definition), (Solution, solution), (Workload, workload), (Trace, trace))
    for kind, document in kinds:
        loaded = kind.model_validate_json(json.dumps(document))
        kept = json.loads(loaded.canonical())
        assert {key: kept[key] for key in document if key not in ("evaluation", "axes", "spec")} == {
            key: value for key, value in document.items() if key not in ("evaluation", "axes", "spec")
        }
    assert Trace.model_validate(trace).evaluation.status is TraceStatus.PASSED
