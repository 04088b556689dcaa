"""What `polymorph up` was asked for, checked before anything starts."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from polymorph.embedded import doctor
from polymorph.embedded.doctor import (
    Finding,
    check_compiler,
    check_disk,
    check_isa,
    check_memory,
    check_model,
    check_port,
    check_python,
    check_system,
    cpu_flags,
)
from polymorph.embedded.folder import StartRefused

_ENGINE_OVERHEAD_GIB = 1.3  # interpreter, torch, compiled graph, buffers; measured on SmolLM2
_START_DISK_GIB = 1.0
_SHORTEST_CONTEXT = 64  # the evaluator's engine replays prompts within it
DEFAULT_MODEL = doctor.DEFAULT_MODEL


@dataclass(frozen=True)
class UpOptions:
    """One start of embedded mode. `tune` leaves compiler and evaluator out when False.

    Without a `mode` the pool keeps the one it has, and a new pool starts in observe.
    """

    model: Path
    workers: int = 1
    port: int = 8000
    data: Path = Path(".polymorph")
    mode: str | None = None
    served_model_name: str | None = None
    kv_gib: int = 1
    max_model_len: int | None = None
    tune: bool = True

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def told_mode(self) -> str:
        """What is known of the mode before the pool's own state can be read."""
        if not self.tune:
            return "none, as nothing tunes"
        return f"{self.mode} (given)" if self.mode else "as this data folder has it, observe where it is new"

    def check(self) -> None:
        """Raises `StartRefused` with one clear line for the first thing that would not work."""
        if self.workers < 1:
            raise StartRefused(f"--workers {self.workers}: at least 1 is needed")
        if self.kv_gib < 1:
            raise StartRefused(f"--kv-gib {self.kv_gib}: at least 1 GiB is needed")
        if self.max_model_len is not None and self.max_model_len < _SHORTEST_CONTEXT:
            raise StartRefused(
                f"--max-model-len {self.max_model_len}: at least {_SHORTEST_CONTEXT} is needed"
            )
        if self.mode not in {None, "observe", "recommend", "canary", "pinned"}:
            raise StartRefused(f"--mode {self.mode}: choose observe, recommend, canary or pinned")
        if sys.platform != "linux":
            raise StartRefused("embedded mode runs on Linux; elsewhere use deploy/compose")
        for finding in self._findings():
            if finding.level == "fail":
                raise StartRefused(f"{finding.check}: {finding.found}; wanted: {finding.wanted}")

    def _findings(self) -> list[Finding]:
        listed = [check_system(), check_python(), check_port(self.port), check_model(self.model)]
        if any(finding.level == "fail" for finding in listed):
            return listed
        engines = self.workers + (1 if self.tune else 0)
        return [
            *listed,
            check_disk(self.data, _START_DISK_GIB),
            check_compiler(),
            check_isa(),
            check_memory(engines * self.engine_gib()),
        ]

    def engine_gib(self) -> float:
        """What one engine takes at most: weights as the engine holds them, a packed copy, KV cache, the rest."""
        stored = sum(file.stat().st_size for file in self.model.glob("*.safetensors")) / 2**30
        if _stored_bits(self.model) == 16 and "avx512_bf16" not in cpu_flags():
            stored *= 2
        return 2 * stored + self.kv_gib + _ENGINE_OVERHEAD_GIB


def _stored_bits(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return 16 if name in {"bfloat16", "float16"} else 32
