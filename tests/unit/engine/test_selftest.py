"""The self-test of any definition by its schema alone, and of kernels that do what no kernel does."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polymorph.config.folders import cache_folder
from polymorph.engine import selftest_judge, selftest_runner
from polymorph.engine.selftest_case import SelfTest, SelfTestResult
from polymorph.engine.selftest_inputs import Unfit, samples
from polymorph.engine.selftest_judge import judge
from polymorph.engine.selftest_reference import decided, error_of
from polymorph.kernels.catalogue.artifacts import artifacts
from polymorph.kernels.definitions import definition_named, fused_add_rms_norm_definition, linear_definition
from polymorph.kernels.host.pool import host_library
from polymorph.kernels.schema import Axis, Definition, DefinitionExtension, TensorSpec
from polymorph.kernels.toolchain import detect_toolchain, run_command
from polymorph.sandbox import isolation
from polymorph.sandbox.sealed import sealed

ABI = Path(__file__).parents[3] / "libs" / "polymorph" / "kernels" / "abi"
HEAD = """
#include "polymorph_kernel.h"
#define RUN extern "C" int32_t pm_run(const pm_context *, const pm_tensor *in, int32_t, const pm_tensor *out, int32_t)
#define F(t) static_cast<float *>((t).data)
#define I(t) static_cast<int32_t *>((t).data)
#define L(t) static_cast<int64_t *>((t).data)
"""
GATHER = Definition(
    name="gather",
    op_type="gather",
    axes={"M": Axis(type="var"), "B": Axis(type="var"), "H": Axis(type="const", value=16)},
    inputs={
        "table": TensorSpec(shape=("B", "H"), dtype="float32"),
        "index": TensorSpec(shape=("M",), dtype="int32"),
        "scale": TensorSpec(shape=None, dtype="float32"),
        "offset": TensorSpec(shape=("H",), dtype="float32"),
    },
    outputs={
        "y": TensorSpec(shape=("M", "H"), dtype="float32"),
        "twice": TensorSpec(shape=("M",), dtype="int64"),
    },
    reference=(
        "def run(table, index, scale, offset=None):\n"
        "    y = table[index.long()] * float(scale)\n"
        "    return y if offset is None else y + offset, 2 * index.long()\n"
    ),
    x_polymorph=DefinitionExtension(optional_inputs=("offset",)),
)
GATHERS = """RUN {
  for (int64_t m = 0; m < in[1].sizes[0]; ++m) {
    for (int64_t h = 0; h < 16; ++h)
      F(out[0])[m * 16 + h] = F(in[0])[I(in[1])[m] * 16 + h] * F(in[2])[0] + (in[3].data ? F(in[3])[h] : 0);
    L(out[1])[m] = 2 * I(in[1])[m];
  }
  return 0;
}"""
EXPERTS = Definition(
    name="experts",
    op_type="moe",
    axes={
        "M": Axis(type="var"),
        "E": Axis(type="const", value=3),
        "H": Axis(type="const", value=8),
    },
    inputs={
        "x": TensorSpec(shape=("M", "H"), dtype="float32"),
        "up": TensorSpec(shape=("E", "H", "2"), dtype="float32"),
        "down": TensorSpec(shape=("E", "H", "2"), dtype="float32"),
    },
    outputs={"y": TensorSpec(shape=("M", "H"), dtype="float32")},
    reference="def run(x, up, down):\n    return x * (up.sum((0, 2)) + 2 * down.sum((0, 2)))\n",
    x_polymorph=DefinitionExtension(packed_inputs=("up", "down")),
)
SUMS = """
extern "C" int64_t pm_pack_bytes(const pm_tensor *w) { return w->sizes[1] * 4; }
extern "C" int32_t pm_pack(const pm_context *, const pm_tensor *w, void *packed) {
  for (int64_t h = 0; h < w->sizes[1]; ++h) {
    float sum = 0;
    for (int64_t e = 0; e < w->sizes[0]; ++e)
      for (int64_t i = 0; i < 2; ++i) sum += F(*w)[(e * w->sizes[1] + h) * 2 + i];
    static_cast<float *>(packed)[h] = sum;
  }
  return 0;
}
RUN {
  for (int64_t m = 0; m < in[0].sizes[0]; ++m)
    for (int64_t h = 0; h < 8; ++h)
      F(out[0])[m * 8 + h] = F(in[0])[m * 8 + h] * (F(in[1])[h] + 2 * F(in[2])[h]);
  return 0;
}"""
SHIFT = Definition(
    name="shift",
    op_type="shift",
    axes={"M": Axis(type="var"), "H": Axis(type="const", value=8)},
    inputs={"x": TensorSpec(shape=("M", "H"), dtype="float32")},
    outputs={"y": TensorSpec(shape=("M", "H"), dtype="float32")},
    reference="def run(x):\n    return x.roll(1, -1)\n",
    x_polymorph=DefinitionExtension(output_aliases={"y": "x"}),
)
SHIFTS = """RUN {
  for (int64_t m = 0; m < in[0].sizes[0]; ++m) {
    const float *x = F(in[0]) + m * 8;
    float *y = F(out[0]) + m * 8;
    const float last = x[7];
    for (int h = 7; h > 0; --h) y[h] = x[h - 1];
    y[0] = last;
  }
  return 0;
}"""
Tried = Callable[..., SelfTestResult]


def judged(
    folder: Path,
    definition: str,
    library: bytes,
    calls: tuple[dict[str, Any], ...],
    rows: tuple[int, ...] = (1, 3),
) -> SelfTestResult:
    """Tests a library on captured calls, with the doors that this host gives."""
    paths = []
    for index, call in enumerate(calls):
        paths.append(str(folder / f"call-{index}.safetensors"))
        save_file(call, paths[-1])
    descriptor = sealed("kernel", library)
    try:
        return judge(
            SelfTest(
                definition=definition, numerics="reordered", calls=tuple(paths), weight=None, rows=rows,
                library=descriptor, host=str(host_library(cache_folder(), detect_toolchain(), run_command)),
                scratch=str(folder), level=int(isolation.detect()),
            )
        )  # fmt: skip
    finally:
        os.close(descriptor)


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tried:
    """Builds a kernel for a definition of the test's own and tests it."""

    def run(
        definition: Definition, source: str, *calls: dict[str, Any], rows: tuple[int, ...] = (1, 3)
    ) -> SelfTestResult:
        monkeypatch.setattr(selftest_judge, "definition_named", lambda _: definition)
        (tmp_path / "k.cpp").write_text(HEAD + source)
        flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-ffreestanding", "-nostdlib", f"-I{ABI}"]
        subprocess.run(["g++", *flags, "k.cpp", "-o", "k.so"], cwd=tmp_path, check=True)
        return judged(tmp_path, definition.name, (tmp_path / "k.so").read_bytes(), calls, rows)

    return run


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm_h64_f32",
        "fused_add_rms_norm_h64_f32",
        "silu_and_mul_d64_f32",
        "rotary_q4_k2_d16_r8_neox_f32",
        "qk_norm_rotary_q4_k2_d16_r16_gptj_f32",
    ],
)
def test_a_kernel_of_the_catalogue_passes_as_its_definition_stands(tmp_path: Path, name: str) -> None:
    definition = definition_named(name)
    sizes = {axis: known.value or {"M": 5}.get(axis, 32) for axis, known in definition.axes.items()}
    call = {}
    for given, spec in definition.inputs.items():
        shape = [sizes[axis] for axis in spec.shape or ()]
        whole = spec.dtype in {"int32", "int64"}
        form = getattr(torch, spec.dtype)
        call[given] = torch.randint(5, shape, dtype=form) if whole else torch.randn(shape, dtype=form)
        if spec.shape is None:
            call[given] = torch.tensor([1e-6])
    (made, *_) = artifacts(definition)
    result = judged(tmp_path, name, made.path.read_bytes(), (call, call), (1, 7))
    assert result.ok, result.reason


def _gather_call(blocks: int, rows: int) -> dict[str, Any]:
    return {
        "table": torch.randn(blocks, 16),
        "index": torch.randint(blocks, (rows,), dtype=torch.int32),
        "scale": torch.tensor([0.25]),
    }


def test_integers_scalars_several_outputs_and_calls_that_cannot_be_joined(tried: Tried) -> None:
    calls = (_gather_call(4, 5), _gather_call(9, 2), _gather_call(2, 1))
    result = tried(GATHER, GATHERS, *calls, rows=(1, 4))
    assert result.ok, result.reason
    wrong = tried(GATHER, GATHERS.replace("= 2 * I", "= 3 * I"), *calls)
    assert not wrong.ok
    assert "integers of twice are others" in wrong.reason
    unscaled = tried(GATHER, GATHERS.replace("* F(in[2])[0]", ""), *calls)
    assert "of y against float64" in unscaled.reason


def test_an_optional_input_is_tried_though_none_was_captured(tried: Tried) -> None:
    result = tried(GATHER, GATHERS.replace("in[3].data ?", "false ?"), _gather_call(4, 5))
    assert not result.ok
    assert "with offset" in result.reason


def test_weights_of_three_dimensions_and_two_packed_inputs(tried: Tried) -> None:
    call = {"x": torch.randn(4, 8), "up": torch.randn(3, 8, 2), "down": torch.randn(3, 8, 2)}
    result = tried(EXPERTS, SUMS, call)
    assert result.ok, result.reason
    swapped = tried(EXPERTS, SUMS.replace("2 * F(in[2])", "F(in[2])"), call)
    assert "of y against float64" in swapped.reason
    refused = tried(EXPERTS, SUMS.replace("return w->sizes[1] * 4;", "return 1ll << 40;"), call)
    assert "pm_pack_bytes gave" in refused.reason


def test_outputs_that_may_share_an_inputs_memory_are_tried_both_ways(tried: Tried) -> None:
    call = {"x": torch.randn(4, 8)}
    result = tried(SHIFT, SHIFTS, call)
    assert result.ok, result.reason
    upward = SHIFTS.replace("for (int h = 7; h > 0; --h)", "for (int h = 1; h < 8; ++h)")
    result = tried(SHIFT, upward, call)
    assert not result.ok
    assert "in place" in result.reason


def test_an_output_that_is_not_written_is_seen_behind_one_that_is(tried: Tried) -> None:
    """A hole in the second output alone: no comparison with it may pass for one with the first."""
    h = 16
    source = """RUN {
      for (int64_t m = 0; m < in[0].sizes[0]; ++m) {
        float sum = 0;
        for (int64_t i = 0; i < 16; ++i) {
          const float v = F(in[0])[m * 16 + i] + F(in[1])[m * 16 + i];
          sum += v * v;
        }
        float low = 1; for (int i = 0; i < 60; ++i) low = 0.5f * (low + (sum / 16 + F(in[3])[0]) / low);
        for (int64_t i = 0; i < 16; ++i) {
          const float v = F(in[0])[m * 16 + i] + F(in[1])[m * 16 + i];
          F(out[0])[m * 16 + i] = v / low * F(in[2])[i];
          /*HOLE*/F(out[1])[m * 16 + i] = v;
        }
      }
      return 0;
    }"""
    call = {"x": torch.randn(4, h), "residual": torch.randn(4, h), "weight": torch.randn(h)}
    definition = fused_add_rms_norm_definition(h, "float32")
    hole = tried(definition, source.replace("/*HOLE*/", "if (i)"), call)
    assert not hole.ok
    assert "residual_out" in hole.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("F(in[0])[0] = 1;", "touched memory that is not its own"),
        ("F(out[0])[in[0].sizes[0] * 8] = 1;", "wrote beside an output"),
        ("F(out[0])[in[0].sizes[0] * 8 + 16] = 1;", "touched memory that is not its own"),
        ("F(out[0])[-4096] = 1;", "touched memory that is not its own"),
        ("return 5;", "answers 5"),
        ("__builtin_trap();", "ended its process"),
        ('long r; asm volatile("syscall" : "=a"(r) : "0"(41l), "D"(2l) : "rcx", "r11");', "made a system call"),
        ('long r; asm volatile("syscall" : "=a"(r) : "0"(231l), "D"(0l) : "rcx", "r11");', "exit code 0"),
    ],
)  # fmt: skip
def test_a_kernel_that_misbehaves_is_told_from_one_that_is_wrong(
    tried: Tried, body: str, reason: str
) -> None:
    result = tried(SHIFT, SHIFTS.replace("RUN {", "RUN {" + body), {"x": torch.randn(4, 8)})
    assert not result.ok
    assert reason in result.reason


def test_a_kernel_that_does_not_return_is_ended(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_runner, "_CALL_S", 1.0)
    endless = SHIFTS.replace("RUN {", "RUN { for (volatile int i = 0; i >= 0; i = 1) {}")
    assert "did not return within 1 s" in tried(SHIFT, endless, {"x": torch.randn(4, 8)}).reason


def test_code_that_runs_at_load_opens_nothing_and_ends_nothing_but_itself(tried: Tried) -> None:
    """No such library comes this far, since it is inspected first: the doors hold all the same."""
    opens = """
    static long opened;
    __attribute__((constructor)) static void early() {
      asm volatile("syscall" : "=a"(opened) : "0"(2l), "D"("/etc/passwd"), "S"(0l) : "rcx", "r11", "memory");
    }
    """
    source = opens + SHIFTS.replace("RUN {", "RUN { if (opened >= 0) return 9;")
    result = tried(SHIFT, source, {"x": torch.randn(4, 8)})
    assert result.ok, result.reason
    leaves = opens.replace('"0"(2l), "D"("/etc/passwd")', '"0"(231l), "D"(3l)')
    left = tried(SHIFT, leaves + SHIFTS, {"x": torch.randn(4, 8)})
    assert "at load: the kernel ended its process (exit code 3)" in left.reason


def test_what_was_captured_must_be_a_call_of_the_definition() -> None:
    linear = linear_definition(4, 8, "float32")
    weight, x = torch.zeros(4, 8), torch.zeros(2, 8)
    with pytest.raises(Unfit, match="no input weight was captured"):
        list(samples(linear, [{"x": x}], (1,)))
    with pytest.raises(Unfit, match=r"weight .* captured as \(4, 9\)"):
        list(samples(linear, [{"x": x, "weight": torch.zeros(4, 9)}], (1,)))
    with pytest.raises(Unfit, match=r"captured as .* of torch\.bfloat16"):
        list(samples(linear, [{"x": x.bfloat16(), "weight": weight}], (1,)))
    with pytest.raises(Unfit, match="no value of the scalar scale"):
        list(
            samples(GATHER, [{"table": torch.zeros(1, 16), "index": torch.zeros(1, dtype=torch.int32)}], (1,))
        )


def test_rows_come_from_all_calls_and_are_repeated_to_any_number() -> None:
    linear = linear_definition(4, 8, "float32")
    calls = [{"x": torch.full((2, 8), float(n)), "weight": torch.zeros(4, 8)} for n in range(3)]
    found = {sample.label: sample.inputs["x"] for sample in samples(linear, calls, (1, 8))}
    assert found["M = 1"].shape == (1, 8)
    wide = found["M = 8 with bias"]
    assert wide[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 0, 0]


def test_rows_that_read_much_are_tried_in_smaller_numbers() -> None:
    """64 MiB of cache a row: 256 rows of it would take the self-test minutes."""
    attention = definition_named("attn_decode_q2_kv1_d64_b128_f32")
    pages = 1024
    call = {
        "q": torch.zeros(1, 2, 64),
        "key_cache": torch.zeros(1, 1, 64, 128),
        "value_cache": torch.zeros(1, 1, 128, 64),
        "block_table": torch.zeros(1, pages, dtype=torch.int32),
        "seq_lens": torch.full((1,), pages * 128, dtype=torch.int32),
        "scale": torch.tensor([0.1]),
    }
    assert [sample.label for sample in samples(attention, [call], (1, 256))] == ["M = 1", "M = 1"]
    call["block_table"] = call["block_table"][:, :16].contiguous()
    assert [sample.label for sample in samples(attention, [call], (1, 256))] == ["M = 1", "M = 127"]


def test_rows_that_an_axis_ties_together_stay_as_they_were_captured() -> None:
    ragged = GATHER.model_copy(
        update={"inputs": {**GATHER.inputs, "starts": TensorSpec(shape=("M + 1",), dtype="int32")}}
    )
    call = {**_gather_call(4, 5), "starts": torch.arange(6, dtype=torch.int32)}
    (plain, *_) = samples(ragged, [call], (3,))
    assert plain.inputs["index"].shape == (5,)


def test_where_the_references_differ_about_an_infinity_either_is_right() -> None:
    truth = torch.tensor([1.0, 2.0, -torch.inf, -torch.inf], dtype=torch.float64)
    native = torch.tensor([1.0, -torch.inf, 3.0, -torch.inf])

    def error(*output: float) -> float:
        given = torch.tensor(output)
        return error_of(given, decided(given, truth, native))

    low = -torch.inf
    assert error(1, 2, low, low) == error(1, low, 3, low) == error(1, 2, 3, low) == 0
    assert error(1, 2, 4, low) > 0.1
    for wrong in ((low, 2, 3, low), (1, 2, 3, 0), (1, 2, torch.nan, low)):
        assert not error(*wrong) <= 1e9
