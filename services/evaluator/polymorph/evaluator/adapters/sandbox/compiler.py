"""Compilers inside the sandbox: a candidate's sources reach the toolchain, one folder, and nothing else."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from polymorph.kernels.build import ABI_HEADER
from polymorph.kernels.toolchain import CommandRunner, Completed, Toolchain
from polymorph.sandbox import isolation
from polymorph.sandbox.isolation import Isolation

_TIMEOUT_S = 60.0
_MODULE = "polymorph.evaluator.adapters.sandbox.confine"


def confined(level: Isolation) -> CommandRunner:
    """A runner for `polymorph.kernels.build.build`."""

    def run(command: Sequence[str], folder: Path) -> Completed:
        argv = [*isolation.prefix(level), sys.executable, "-m", _MODULE, str(folder.absolute()), *command]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S,
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"}, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Completed(124, "", f"the compiler did not end within {_TIMEOUT_S:.0f} s")
        return Completed(done.returncode, done.stdout[-20000:], done.stderr[-20000:])

    return run


def build_harness(toolchain: Toolchain, folder: Path) -> Path:
    """Compiles our own code for candidates' processes, once for each toolchain.

    Raises:
        RuntimeError: it does not compile.
    """
    source = Path(__file__).with_name("harness.cpp")
    target = folder / f"harness-{toolchain.digest}-{source.stat().st_mtime_ns}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        staged = Path(temporary) / "harness.so"
        command = [
            toolchain.compiler, "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi",
            f"-I{ABI_HEADER.parent}", str(source), "-o", str(staged),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the evaluator's harness does not compile: {done.stderr[:2000]}")
        staged.rename(target)
    return target
