"""Kernels of the catalogue: built without a warning, inspected, and right on ragged and adversarial shapes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polymorph.kernels.build import build
from polymorph.kernels.catalogue import solutions
from polymorph.kernels.catalogue.artifacts import Artifact, artifacts
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.host.pool import KernelHost
from polymorph.kernels.isa import Isa, detect_isa
from polymorph.kernels.load import DtypeCode, Kernel, Tensor
from polymorph.kernels.schema import Definition
from polymorph.kernels.toolchain import detect_toolchain, run_command

# The width is no multiple of a vector.
DEFINITIONS = (
    "rms_norm_h83_f32",
    "rms_norm_h83_bf16",
    "fused_add_rms_norm_h83_f32",
    "fused_add_rms_norm_h83_bf16",
    "silu_and_mul_d83_f32",
    "silu_and_mul_d300_bf16",
    "rotary_q3_k1_d22_r20_neox_f32",
    "rotary_q3_k1_d22_r20_gptj_bf16",
    "qk_norm_rotary_q2_k1_d38_r38_neox_f32",
    "qk_norm_rotary_q2_k1_d38_r18_neox_bf16",
    "qk_norm_rotary_q2_k1_d20_r20_gptj_f32",
)
_POSITIONS = 50


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernels of a definition at this machine's tier, each built once."""
    folder = tmp_path_factory.mktemp("catalogue")
    known: dict[str, tuple[Artifact, ...]] = {}

    def of(name: str) -> tuple[Artifact, ...]:
        if name not in known:
            known[name] = artifacts(definition_named(name), folder=folder)
        return known[name]

    return of


@pytest.fixture(scope="module")
def context() -> Iterator[int]:
    with KernelHost.build().context(2) as address:
        yield address


def _view(tensor: Any) -> Tensor:
    if tensor is None:
        return Tensor.absent()
    code = DtypeCode[str(tensor.dtype).removeprefix("torch.")]
    return Tensor.at(tensor.data_ptr(), tuple(tensor.shape), code, tensor.stride())


def _widened(tensor: Any) -> Any:
    return tensor.double() if tensor.is_floating_point() else tensor


def _reference(definition: Definition) -> Any:
    scope: dict[str, Any] = {}
    exec(compile(definition.reference, definition.name, "exec"), scope)  # noqa: S102
    return scope["run"]


def _inputs(definition: Definition, m: int) -> dict[str, Any]:
    """Values of many sizes, rows that are all zero, and rows that are a view of something wider."""
    made: dict[str, Any] = {}
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            made[name] = torch.tensor([1e-5])
            continue
        dtype = getattr(torch, spec.dtype)
        shape = [_length(definition, axis, m) for axis in spec.shape]
        if name == "positions":
            made[name] = torch.randint(0, _POSITIONS, (2 * m,))[::2]
        elif spec.shape[0] == "M":
            wide = torch.randn(shape[0], shape[1] + 5) * 10.0 ** torch.randint(-3, 4, (m, 1))
            wide[m // 2] = 0
            made[name] = wide.to(dtype)[:, : shape[1]]
        else:
            made[name] = torch.randn(shape).to(dtype)
    return made


def _length(definition: Definition, axis: str, m: int) -> int:
    return {"M": m, "P": _POSITIONS}.get(axis) or definition.axes[axis].value or 0


def _outputs(definition: Definition, m: int) -> list[Any]:
    return [
        torch.full(
            [_length(definition, axis, m) for axis in spec.shape],
            float("nan"),
            dtype=getattr(torch, spec.dtype),
        )
        for spec in definition.outputs.values()
    ]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_variant_is_right(built: Any, context: int, name: str) -> None:
    definition = definition_named(name)
    for m in (1, 2, 5, 33):
        inputs = _inputs(definition, m)
        exact = _reference(definition)(**{key: _widened(value) for key, value in inputs.items()})
        for artifact in built(name):
            outputs = _outputs(definition, m)
            views = [_view(value) for value in inputs.values()]
            status = Kernel(artifact.path).run(context, views, [_view(each) for each in outputs])
            assert status == 0, artifact.label
            wanted = exact if isinstance(exact, tuple) else (exact,)
            for found, truth in zip(outputs, wanted, strict=True):
                # Differences cancel within a row: an error is as large as what was subtracted.
                allowed = 4 * torch.finfo(found.dtype).eps * truth.abs().amax(-1, keepdim=True)
                off = (found.double() - truth).abs() - allowed
                assert off.max() <= 0, f"{artifact.label} at M = {m} is off by {off.max()} more than allowed"


@pytest.mark.parametrize(
    "name", [name for name in DEFINITIONS if definition_named(name).x_polymorph.output_aliases]
)
def test_outputs_may_be_the_inputs_that_they_alias(built: Any, context: int, name: str) -> None:
    definition = definition_named(name)
    aliases = definition.x_polymorph.output_aliases
    for artifact in built(name):
        kernel = Kernel(artifact.path)
        inputs, outputs = _inputs(definition, 5), _outputs(definition, 5)
        assert (
            kernel.run(context, [_view(each) for each in inputs.values()], [_view(each) for each in outputs])
            == 0
        )
        views = [_view(inputs[aliases[output]]) for output in definition.outputs]
        assert kernel.run(context, [_view(each) for each in inputs.values()], views) == 0
        for output, apart in zip(definition.outputs, outputs, strict=True):
            assert torch.equal(inputs[aliases[output]], apart), f"{artifact.label}: {output}"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_variants_are_distinct_and_of_this_machine(built: Any, name: str) -> None:
    found = built(name)
    assert len(found) >= 4
    assert len({artifact.digest for artifact in found}) == len(found)
    assert len({artifact.label for artifact in found}) == len(found)
    assert {Isa[artifact.solution.x_polymorph.isa] for artifact in found} == {min(detect_isa(), Isa.AVX512)}


@pytest.mark.parametrize("isa", [Isa.GENERIC, Isa.AVX2, Isa.AVX512])
def test_every_tier_compiles_without_a_warning(tmp_path: Path, isa: Isa) -> None:
    for name in DEFINITIONS[::2]:
        for solution in solutions(definition_named(name), isa)[:2]:
            assert build(solution, tmp_path / solution.name, detect_toolchain(), run_command).log == ""


def test_shapes_that_are_not_the_definitions_are_refused(built: Any, context: int) -> None:
    kernel = Kernel(built("rms_norm_h83_f32")[0].path)
    x, weight, eps = torch.randn(2, 82), torch.randn(82), torch.tensor([1e-5])
    assert kernel.run(context, [_view(x), _view(weight), _view(eps)], [_view(torch.empty(2, 82))]) != 0


def test_what_was_tampered_with_is_built_again(tmp_path: Path) -> None:
    definition = definition_named("rms_norm_h32_f32")
    first = artifacts(definition, folder=tmp_path)[0]
    content = first.path.read_bytes()
    first.path.write_bytes(content[:-1] + b"x")
    assert artifacts(definition, folder=tmp_path)[0].path.read_bytes() == content
