"""A Triton kernel from its source: kept under the digest of its content, checked, then loaded as a module of its own."""

import builtins
import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from polymorph.engine.gpu.source import SourceRefused, check

FP_FUSION = "TRITON_DEFAULT_FP_FUSION"
_BUILTINS = ("abs", "float", "int", "len", "max", "min", "range")


class TritonMissing(RuntimeError):
    """This environment has no Triton."""


@dataclass(frozen=True, eq=False)
class TritonKernel:
    """A loaded kernel. Its compiled code is unloaded with the last reference to it: whoever captured it in a graph, or
    launched it without waiting, must hold on to it.
    """

    artifact: str
    operation: str
    path: Path
    module: ModuleType

    def launch(self, *arguments: Any) -> None:
        """Launches it on the current stream; `source.LAUNCH` tells the arguments."""
        self.module.launch(*arguments)

    def scratch_floats(self, m: int, n: int, k: int) -> int:
        """How many float32 of scratch memory a linear call of that size needs."""
        needed = getattr(self.module, "scratch_floats", None)
        return int(needed(m, n, k)) if needed is not None else 0


def digest(source: str) -> str:
    """What names the artifact: the sha256 of its source."""
    return hashlib.sha256(source.encode()).hexdigest()


def keep(source: str, folder: Path) -> Path:
    """Writes the source to a file named by its content, readable by this user alone; a file that is there stays."""
    path = folder.resolve() / f"{digest(source)}.py"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        staged = path.with_name(f"{path.name}.{os.getpid()}")
        staged.write_text(source)
        staged.chmod(0o400)
        staged.replace(path)
    return path


def load(path: Path, operation: str) -> TritonKernel:
    """Loads a source that `keep` wrote. The file is read once: what was checked is what runs.

    Raises:
        SourceRefused: its content is not what its name says, or is no kernel for the operation.
        TritonMissing: there is no Triton here.
    """
    source = path.read_text()
    artifact = digest(source)
    if path.stem != artifact:
        raise SourceRefused(f"{path.name} holds other content, of digest {artifact[:12]}")
    check(source, operation)
    return TritonKernel(artifact, operation, path, _module(source, path, artifact))


def toolchain() -> str:
    """What decides the code that comes out of a source, for a manifest; it is the same where a result may be used.

    Raises:
        TritonMissing: there is no Triton here.
    """
    triton = _triton()
    return f"triton {triton.__version__} fp-fusion={os.environ[FP_FUSION]}"


def _triton() -> Any:
    # Contraction of products and sums decides bits, and its default changes with Triton 3.10.
    os.environ.setdefault(FP_FUSION, "1")
    try:
        import triton  # noqa: PLC0415 - an engine without a GPU has none
        import triton.language  # noqa: PLC0415
    except ImportError as error:
        raise TritonMissing(f"triton does not import here: {error}") from error
    return triton


def _module(source: str, path: Path, artifact: str) -> ModuleType:
    _triton()
    module = ModuleType(f"polymorph_triton_{artifact[:16]}")
    module.__file__ = str(path)
    allowed: dict[str, Any] = {name: getattr(builtins, name) for name in _BUILTINS}
    module.__dict__["__builtins__"] = {**allowed, "__import__": _import}
    exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 - checked above, signed before
    return module


def _import(name: str, *_: Any) -> Any:
    if name not in {"triton", "triton.language"}:
        raise SourceRefused(f"the source imports {name}: only triton and triton.language may be")
    return sys.modules["triton.language" if _ and _[2] else "triton"]
