"""How vLLM is started, with our slots and without."""

import shlex
from pathlib import Path

import pytest

from polymorph.engine import launch
from polymorph.engine.bindings import BindingRefused, SlotBinding, checked
from polymorph.engine.launch import EngineLaunch, auto_dtype
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Cpu


def _cpu(flags: str) -> Cpu:
    return Cpu.parse(f"processor : 0\nflags : {flags}\n", "x86_64")


def test_dtype_follows_what_the_processor_computes_in() -> None:
    avx2 = "avx2 fma f16c"
    avx512 = f"{avx2} avx512f avx512bw avx512dq avx512vl"
    assert auto_dtype(_cpu(avx2)) == "float32"
    assert auto_dtype(_cpu(avx512)) == "float32"
    assert auto_dtype(_cpu(f"{avx512} avx512_bf16")) == "bfloat16"
    assert auto_dtype(Cpu.parse("", "aarch64")) == "float32"


def test_plain_and_ours_differ_in_the_extension_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    ours = EngineLaunch(Path("m"), max_model_len=512)
    added = {"worker_extension_cls", "additional_config"}
    assert set(ours.arguments()) - set(ours.plain_arguments()) == added
    assert {k: v for k, v in ours.arguments().items() if k not in added} == ours.plain_arguments()
    assert ours.without_slots().arguments() == ours.plain_arguments()


def test_the_command_line_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/graphs")  # the default lies in a folder of our name
    words = shlex.split(EngineLaunch(Path("a model"), dtype="float32").command_line())
    assert words[words.index("serve") + 1] == "a model"
    assert words[words.index("--dtype") + 1] == "float32"
    plain = EngineLaunch(Path("m"), dtype="float32").command_line(plain=True)
    assert "polymorph" not in plain.lower()


def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    with pytest.raises(ValueError, match="use 1 to"):
        EngineLaunch(Path("m"), threads=100_000).environment()


def test_an_engine_in_its_callers_process_binds_its_threads_as_a_worker_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: {3, 1, 2})
    monkeypatch.setattr(launch, "openmp_library", lambda: Path("libiomp5.so"))
    bound = EngineLaunch(Path("m"), threads=2).in_process_environment()
    assert bound["VLLM_CPU_OMP_THREADS_BIND"] == "1-2"
    assert bound["OMP_NUM_THREADS"] == "2"
    assert bound["KMP_AFFINITY"].endswith("proclist=[1,2]")
    assert int(bound["KMP_BLOCKTIME"]) < 10
    monkeypatch.setattr(launch, "openmp_library", lambda: None)
    assert EngineLaunch(Path("m")).in_process_environment()["GOMP_CPU_AFFINITY"] == "1 2 3"


def test_ranges_of_cores() -> None:
    assert launch._ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


@pytest.mark.parametrize("name", ["gemm_n960_k576_f32", "rms_norm_h576_bf16", "fused_add_rms_norm_h64_f32"])
def test_names_of_slots_are_names_of_definitions(name: str) -> None:
    assert definition_named(name).name == name


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="names no operation"):
        definition_named("attention")


def _binding(min_m: int, max_m: int, artifact: str = "a") -> SlotBinding:
    return SlotBinding("gemm_n16_k16_f32", min_m, max_m, "/x.so", artifact)


def test_bindings_take_whole_buckets() -> None:
    assert _binding(1, 1).buckets() == (0,)
    assert _binding(3, 8).buckets() == (2, 3)
    assert _binding(1, 1 << 30).buckets() == tuple(range(14))
    for low, high in ((1, 5), (2, 3), (6, 8)):
        with pytest.raises(BindingRefused, match="cuts a bucket"):
            _binding(low, high).buckets()


def test_two_kernels_cannot_claim_one_bucket() -> None:
    documents = [vars(_binding(1, 4, "a")), vars(_binding(3, 8, "b"))]
    with pytest.raises(BindingRefused, match="both a and b"):
        checked(documents, ["gemm_n16_k16_f32"])


def test_two_kernels_may_share_a_bucket_where_a_feature_parts_them() -> None:
    low, high = vars(_binding(1, 4, "a")) | {"most": 49}, vars(_binding(1, 4, "b")) | {"least": 50}
    assert len(checked([low, high], ["gemm_n16_k16_f32"])) == 2
    with pytest.raises(BindingRefused, match="both a and b"):
        checked([low, high | {"least": 49}], ["gemm_n16_k16_f32"])
    with pytest.raises(BindingRefused, match="no call has 3 to 2"):
        checked([low | {"least": 3, "most": 2}], ["gemm_n16_k16_f32"])


def test_a_definition_without_a_slot_is_refused() -> None:
    with pytest.raises(BindingRefused, match="no slot for"):
        checked([vars(_binding(1, 1))], ["gemm_n8_k8_f32"])
