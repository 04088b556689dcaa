"""Definitions: names, references, and documents of FlashInfer-Bench's schema."""

import json

import pytest
import torch

from polymorph.kernels.definitions import (
    Heads,
    definition_named,
    fused_add_rms_norm_definition,
    linear_definition,
    qk_norm_rotary_definition,
    rms_norm_definition,
    rotary_definition,
    silu_and_mul_definition,
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
        silu_and_mul_definition(8, "float32"),
        qk_norm_rotary_definition(Heads(2, 1, 8, 8), "float32"),
    ):
        again = Definition.model_validate_json(definition.canonical())
        assert again == definition
        assert again.digest() == definition.digest()


def test_a_name_tells_its_definition() -> None:
    for definition in (
        linear_definition(960, 576, "float32"),
        rms_norm_definition(576, "bfloat16"),
        fused_add_rms_norm_definition(576, "float32"),
        silu_and_mul_definition(1536, "float32"),
        rotary_definition(Heads(9, 3, 64, 64), "bfloat16"),
        qk_norm_rotary_definition(Heads(4, 2, 64, 32, "gptj"), "float32"),
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


def test_the_gate_is_torchs_silu() -> None:
    x = torch.randn(4, 12)
    run = reference(silu_and_mul_definition(6, "float32"))
    torch.testing.assert_close(run(x), torch.nn.functional.silu(x[:, :6]) * x[:, 6:])
    assert run(x.double()).dtype is torch.float64


@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_rotation_keeps_lengths_and_turns_by_the_position(style: str) -> None:
    """A pair is a complex number that is multiplied by e^(i angle); what is beyond the turned values passes."""
    heads = Heads(2, 1, 6, 4, style)  # type: ignore[arg-type]
    positions, query, key = torch.tensor([3, 0]), torch.randn(2, 12), torch.randn(2, 6)
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1]))
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    turned, _ = reference(rotary_definition(heads, "float32"))(positions, query, key, cache)
    first, second = (slice(0, 2), slice(2, 4)) if style == "neox" else (slice(0, 4, 2), slice(1, 4, 2))

    def pairs(x):
        x = x.view(2, 2, 6)
        return torch.complex(x[..., first], x[..., second])

    wanted = pairs(query) * torch.polar(torch.ones(2, 1, 2), angles[positions].unsqueeze(1))
    torch.testing.assert_close(pairs(turned), wanted)
    assert torch.equal(turned.view(2, 2, 6)[..., 4:], query.view(2, 2, 6)[..., 4:])
    assert torch.equal(turned[1], query[1])


def test_heads_are_normalised_before_they_turn() -> None:
    heads = Heads(2, 1, 6, 4)
    positions, query, key, cache = (
        torch.tensor([3, 0]),
        torch.randn(2, 12),
        torch.randn(2, 6),
        torch.randn(5, 4),
    )
    weights = torch.rand(6), torch.rand(6)
    found = reference(qk_norm_rotary_definition(heads, "float32"))(
        positions, query, key, cache, *weights, 1e-5
    )
    normed = [
        torch.nn.functional.rms_norm(x.unflatten(-1, (-1, 6)), (6,), weight, 1e-5).flatten(1)
        for x, weight in zip((query, key), weights, strict=True)
    ]
    wanted = reference(rotary_definition(heads, "float32"))(positions, *normed, cache)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_heads_that_cannot_be_turned_are_refused() -> None:
    with pytest.raises(ValueError, match="an even number up to its width"):
        rotary_definition(Heads(2, 1, 6, 8), "float32")
    with pytest.raises(ValueError, match="an even number"):
        rotary_definition(Heads(2, 1, 6, 5), "float32")
