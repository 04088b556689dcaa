"""Builds the dispatcher once for a torch release and its own sources, and keeps it under the user's cache folder."""

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from polymorph.config.folders import cache_folder

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "src"
_ABI = Path(__file__).parents[2] / "kernels" / "abi"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-DNDEBUG")


class DispatcherBuildError(RuntimeError):
    """The dispatcher cannot be built here; the text says what is missing."""


def torch_dir() -> Path:
    """Where torch lies, without importing it.

    Raises:
        DispatcherBuildError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise DispatcherBuildError("torch is not installed: run `make setup`")
    return Path(spec.origin).parent


def source_digest() -> str:
    """A digest of everything that decides the library: our sources, the kernel ABI, torch's release, the flags."""
    digest = hashlib.sha256()
    for path in (*sorted(_SOURCES.iterdir()), _ABI / "polymorph_kernel.h", torch_dir() / "version.py"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(" ".join(_FLAGS).encode())
    return digest.hexdigest()[:16]


def library_path() -> Path:
    """Where the built dispatcher lies, or will."""
    return cache_folder() / f"dispatcher-{source_digest()}.so"


def ensure_built() -> Path:
    """Builds the dispatcher unless it is there (tens of seconds, once); safe between processes.

    Raises:
        DispatcherBuildError: no compiler, or the compiler refused.
    """
    target = library_path()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _log.info("building the kernel dispatcher (once for this torch release)")
            _compile(target)
    return target


def _compile(target: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise DispatcherBuildError("no C++ compiler: install g++ 12 or newer, or name one in CXX")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "dispatcher.so"
        done = subprocess.run(_command(compiler, made), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise DispatcherBuildError(f"{compiler} refused the dispatcher:\n{done.stderr[-4000:]}")
        made.rename(target)


def _command(compiler: str, made: Path) -> list[str]:
    torch = torch_dir()
    includes = [_SOURCES, _ABI, torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    return [
        compiler,
        *_FLAGS,
        *(f"-isystem{path}" for path in includes),
        str(_SOURCES / "dispatcher.cpp"),
        "-o",
        str(made),
        f"-L{torch / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        # torch carries libgomp.so.1 beside it, and has loaded it by the time we come: one runtime, one set of threads.
        f"-Wl,-rpath,{torch / 'lib'}",
    ]


if __name__ == "__main__":
    sys.stdout.write(f"{ensure_built()}\n")
