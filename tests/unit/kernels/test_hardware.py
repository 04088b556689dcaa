"""Tiers, classes and fingerprints of processors."""

import re
from pathlib import Path

import pytest

from polymorph.kernels.isa import Cpu, Isa, hardware_class

AMD = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 23
model\t\t: 1
model name\t: AMD EPYC
flags\t\t: sse2 avx2 fma f16c

processor\t: 1
vendor_id\t: AuthenticAMD
cpu family\t: 23
model\t\t: 1
flags\t\t: sse2 avx2 fma f16c
"""


def with_flags(flags: str) -> Cpu:
    return Cpu.parse(AMD.replace("sse2 avx2 fma f16c", flags), "x86_64")


@pytest.mark.parametrize(
    ("flags", "tier"),
    [
        ("sse2", Isa.GENERIC),
        ("avx2 fma", Isa.GENERIC),
        ("avx2 fma f16c", Isa.AVX2),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl", Isa.AVX512),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16", Isa.AVX512_BF16),
        ("avx2 fma f16c avx512f avx512_bf16", Isa.AVX2),
    ],
)
def test_the_tier_follows_the_flags(flags: str, tier: Isa) -> None:
    assert with_flags(flags).isa is tier


def test_the_class_names_maker_family_model_tier_and_cores() -> None:
    assert Cpu.parse(AMD, "x86_64").hardware_class == "amd-f23-m1-avx2-c2"


def test_arm_has_its_own_tier() -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    assert Cpu.parse(text, "aarch64").isa is Isa.NEON


def test_no_information_is_the_generic_tier(tmp_path: Path) -> None:
    cpu = Cpu.read(tmp_path / "absent", tmp_path)
    assert cpu.cores == 1
    assert cpu.flags == frozenset()


def test_caches_and_flags_change_the_fingerprint_not_the_class() -> None:
    one, two = Cpu.parse(AMD, "x86_64", ("3-Unified-8M",)), Cpu.parse(AMD, "x86_64", ("3-Unified-16M",))
    assert one.hardware_class == two.hardware_class
    assert one.fingerprint != two.fingerprint


def test_this_machines_class_is_a_subject_token() -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]+", hardware_class())


@pytest.mark.parametrize(
    ("machine", "needed", "runs"),
    [
        (Isa.AVX512, Isa.AVX2, True),
        (Isa.AVX2, Isa.AVX512, False),
        (Isa.NEON, Isa.AVX2, False),
        (Isa.AVX2, Isa.NEON, False),
        (Isa.NEON, Isa.GENERIC, True),
        (Isa.GENERIC, Isa.GENERIC, True),
    ],
)
def test_a_tier_runs_those_below_it(machine: Isa, needed: Isa, runs: bool) -> None:
    assert machine.runs(needed) is runs
