"""Kernels for tests: built here, and signed as an evaluator signs them."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

from polymorph.bus.port import Bus
from polymorph.events.values import KernelBinding, Numerics
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import Cpu
from polymorph.kernels.schema import Manifest
from polymorph.kernels.signing import Signer, sign_manifest

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "tests" / "unit" / "engine" / "packed_gemm.cpp"
ABI = ROOT / "libs" / "polymorph" / "kernels" / "abi"


def built(folder: Path, *defines: str, source: Path = SOURCE) -> bytes:
    target = folder / f"kernel{hashlib.sha256(repr((defines, source)).encode()).hexdigest()[:8]}.so"
    flags = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffreestanding", "-nostdlib"]
    flags += ["-fno-exceptions", "-fno-rtti", "-Wl,--hash-style=sysv", f"-I{ABI}", *defines]
    subprocess.run(["g++", *flags, str(source), "-o", str(target)], check=True)
    return target.read_bytes()


async def signed(bus: Bus, library: bytes, definition: str, signer: Signer, **changes: Any) -> KernelBinding:
    """Puts a kernel and its signed manifest into the object store; `changes` are to the manifest."""
    artifact = await bus.put_object(library)
    fields = {
        "artifact": artifact,
        "definition": definition,
        "definition_digest": definition_named(definition).digest(),
        "solution": "1" * 64,
        "hardware": Cpu.read().fingerprint,
        "isa": Cpu.read().isa.name,
        "toolchain": "test",
        "layout": None,
        "numerics": Numerics.REORDERED,
        "min_m": 1,
        "max_m": 1 << 30,
        "evidence": "2" * 64,
    } | changes
    manifest = await bus.put_object(sign_manifest(Manifest(**fields), signer).canonical())
    return KernelBinding(
        definition=definition,
        min_m=1,
        max_m=1 << 30,
        manifest=manifest,
        artifact=artifact,
        numerics=fields["numerics"],
    )
