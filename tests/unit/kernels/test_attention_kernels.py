"""Kernels of decode attention: every variant on ragged, paged and spoiled caches, against the reference in float64."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from polymorph.kernels.build import build
from polymorph.kernels.catalogue import solutions
from polymorph.kernels.catalogue.artifacts import Artifact, artifacts
from polymorph.kernels.definitions import attn_decode_definition, definition_named
from polymorph.kernels.host.pool import KernelHost
from polymorph.kernels.isa import Isa, detect_isa
from polymorph.kernels.load import DtypeCode, Kernel, Tensor
from polymorph.kernels.toolchain import detect_toolchain, run_command

# Three query heads to a KV head, and one; a head that is no multiple of a wide vector; small blocks.
NAMES = ("attn_decode_q6_kv2_d32_b32_f32", "attn_decode_q2_kv2_d48_b16_bf16")
LENGTHS = ((1,), (5,), (32, 33), (200,), (70, 1, 31, 32, 0, 64), (17,) * 9)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Artifact, ...]]:
    folder = tmp_path_factory.mktemp("attention")
    return {name: artifacts(definition_named(name), folder=folder) for name in NAMES}


@pytest.fixture(scope="module")
def context() -> Iterator[int]:
    with KernelHost.build().context(2) as address:
        yield address


def _view(tensor: Any) -> Tensor:
    code = DtypeCode[str(tensor.dtype).removeprefix("torch.")]
    return Tensor.at(tensor.data_ptr(), tuple(tensor.shape), code, tensor.stride())


def _reference(name: str) -> Any:
    scope: dict[str, Any] = {}
    exec(compile(definition_named(name).reference, name, "exec"), scope)  # noqa: S102
    return scope["run"]


def _inputs(name: str, lengths: Sequence[int]) -> dict[str, Any]:
    """A cache as vLLM lays it out, its blocks in random order; what lies beyond a sequence's tokens is NaN."""
    definition = definition_named(name)
    heads, kv_heads, d, block = (definition.axes[axis].value or 0 for axis in ("Hq", "Hk", "D", "block"))
    dtype = getattr(torch, definition.inputs["q"].dtype)
    pages = [-(-length // block) for length in lengths]
    blocks = sum(pages) + 2
    whole = torch.randn(blocks, kv_heads, 2 * block, d).to(dtype)
    keys, values = whole.chunk(2, dim=2)
    keys = keys.as_strided((blocks, kv_heads, d, block), (whole.stride(0), whole.stride(1), block, 1))
    table = torch.full((len(lengths), max(1, *pages)), -7, dtype=torch.int32)
    order = iter(torch.randperm(blocks).tolist())
    for row, length in enumerate(lengths):
        for page in range(pages[row]):
            table[row, page] = number = next(order)
            used = min(block, length - page * block)
            keys[number, :, :, used:] = float("nan")
            values[number, :, used:] = float("nan")
    return {
        "q": torch.randn(len(lengths), heads + 1, d).to(dtype)[:, :heads],
        "key_cache": keys,
        "value_cache": values,
        "block_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "scale": torch.tensor([d**-0.5]),
    }


def _run(artifact: Artifact, context: int, inputs: dict[str, Any]) -> tuple[int, Any]:
    o = torch.full(inputs["q"].shape, float("nan"), dtype=inputs["q"].dtype)
    status = Kernel(artifact.path).run(context, [_view(each) for each in inputs.values()], [_view(o)])
    return status, o


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_variant_is_right(built: Any, context: int, name: str, lengths: Sequence[int]) -> None:
    torch.manual_seed(len(lengths))
    inputs = _inputs(name, lengths)
    wide = {key: each.double() if each.is_floating_point() else each for key, each in inputs.items()}
    exact = _reference(name)(**wide)
    for artifact in built[name]:
        status, o = _run(artifact, context, inputs)
        assert status == 0, artifact.label
        allowed = 8 * torch.finfo(o.dtype).eps * exact.abs().max()
        assert (o.double() - exact).abs().max() <= allowed, artifact.label


def test_the_reference_is_torchs_attention() -> None:
    inputs = _inputs(NAMES[0], (70,))
    pages = inputs["block_table"][0].long()
    keys = inputs["key_cache"][pages].permute(1, 0, 3, 2).flatten(1, 2)[:, :70]
    values = inputs["value_cache"][pages].transpose(0, 1).flatten(1, 2)[:, :70]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        inputs["q"][0].unsqueeze(1), keys, values, enable_gqa=True
    )
    torch.testing.assert_close(_reference(NAMES[0])(**inputs)[0], wanted.squeeze(1))


def test_no_number_is_hidden(built: Any, context: int) -> None:
    """What is wrong in the cache must show: a NaN among the tokens of a sequence is one in its output."""
    for artifact in built[NAMES[0]]:
        inputs = _inputs(NAMES[0], (40, 40))
        inputs["key_cache"][inputs["block_table"][1, 0], 1, 3, 5] = float("nan")
        status, o = _run(artifact, context, inputs)
        assert status == 0
        assert o[0].isfinite().all()
        assert o[1, :3].isfinite().all()
        assert o[1, 3:].isnan().all()


def test_what_a_kernel_cannot_serve_it_refuses(built: Any, context: int) -> None:
    artifact = built[NAMES[0]][0]
    for change in ("a block that is not there", "longer than its table", "another head"):
        inputs = _inputs(NAMES[0], (40, 3))
        if change == "a block that is not there":
            inputs["block_table"][0, 1] = 99
        elif change == "longer than its table":
            inputs["seq_lens"][1] = 65
        else:
            inputs["q"] = torch.randn(2, 6, 31)
        assert _run(artifact, context, inputs)[0] != 0, change


def test_variants_are_distinct_and_of_this_machine(built: Any) -> None:
    for found in built.values():
        assert len({artifact.digest for artifact in found}) == len(found) >= 4
        assert {Isa[each.solution.x_polymorph.isa] for each in found} == {min(detect_isa(), Isa.AVX512)}


@pytest.mark.parametrize("isa", [Isa.GENERIC, Isa.AVX2, Isa.AVX512])
def test_every_tier_compiles_without_a_warning(tmp_path: Any, isa: Isa) -> None:
    definition = attn_decode_definition(9, 3, 64, 128, "float32")
    for solution in solutions(definition, isa)[:2]:
        assert build(solution, tmp_path / solution.name, detect_toolchain(), run_command).log == ""


def test_a_name_tells_its_definition() -> None:
    definition = attn_decode_definition(9, 3, 64, 128, "bfloat16")
    assert definition.name == "attn_decode_q9_kv3_d64_b128_bf16"
    assert definition_named(definition.name) == definition
    assert definition.x_polymorph.feature is not None
    with pytest.raises(ValueError, match="9 query heads over 2 KV heads"):
        attn_decode_definition(9, 2, 64, 128, "float32")
    assert solutions(attn_decode_definition(1, 1, 24, 32, "float32"), Isa.AVX2) == ()
