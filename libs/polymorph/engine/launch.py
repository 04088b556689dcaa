"""How vLLM is started: as a careful engineer would, with our extension or without it, the same otherwise."""

import dataclasses
import functools
import importlib.util
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymorph.config.folders import cache_folder
from polymorph.engine.disable import Disabled
from polymorph.engine.dispatcher.build import source_digest
from polymorph.kernels.isa import Cpu, Isa

EXTENSION = "polymorph.engine.extension.PolymorphExtension"
DEFAULT_SLOTS = ("linear", "moe", "attention", "sampling")


def auto_dtype(cpu: Cpu | None = None) -> str:
    """bfloat16 where the processor computes in it; else float32: without those instructions vLLM's bfloat16 layers
    fall back to a path that is several times slower.
    """
    processor = cpu or Cpu.read()
    native = processor.isa >= Isa.AVX512_BF16 and processor.isa is not Isa.NEON
    return "bfloat16" if native or processor.flags & {"amx_bf16", "bf16"} else "float32"


def _cores(threads: int) -> list[int]:
    """The first `threads` cores of this process; 0 is all.

    Raises:
        ValueError: there are fewer.
    """
    cores = sorted(os.sched_getaffinity(0))
    if not 0 <= threads <= len(cores):
        raise ValueError(f"{threads} threads on {len(cores)} cores: use 1 to {len(cores)}")
    return cores[: threads or None]


def openmp_library() -> Path | None:
    """libiomp5.so of this environment, faster here than torch's own runtime; None where it is not installed."""
    found = Path(sys.prefix) / "lib" / "libiomp5.so"
    return found if found.exists() else None


@dataclass(frozen=True)
class EngineLaunch:
    """One way to start vLLM. `threads` 0 binds every core of this process.

    The envelope is what the engine is compiled and allocated for; within it `max_num_seqs` and `max_num_batched_tokens`
    may change while the engine runs. It is at least as wide as they are.
    """

    model: Path
    dtype: str = "auto"
    served_model_name: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = (
        512  # a longer prefill on a few cores makes every stream beside it wait for seconds
    )
    envelope_num_seqs: int = 0
    envelope_batched_tokens: int = 0
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    scheduling_policy: str = "fcfs"
    block_size: int | None = None
    tensor_parallel_size: int = 1
    speculative_method: str = "none"
    speculative_model: str | None = None
    num_speculative_tokens: int = 0
    kv_gib: int = 1
    threads: int = 0
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    slots: tuple[str, ...] = DEFAULT_SLOTS
    kept_weights_mib: int = 4096
    packed_weights_mib: int = 4096

    def plain_arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's EngineArgs, AsyncEngineArgs or LLM, without our extension."""
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "dtype": auto_dtype() if self.dtype == "auto" and on_cpu() else self.dtype,
            "max_num_seqs": max(self.max_num_seqs, self.envelope_num_seqs),
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.envelope_batched_tokens),
            "enable_prefix_caching": self.enable_prefix_caching,
            **self._within_the_envelope(),
            **self._other_than_usual(),
        }
        if self.served_model_name is not None:
            arguments["served_model_name"] = self.served_model_name
        if self.max_model_len is not None:
            arguments["max_model_len"] = self.max_model_len
        if self.enforce_eager:
            arguments["enforce_eager"] = True
        return arguments

    def _within_the_envelope(self) -> dict[str, Any]:
        limits: dict[str, Any] = {}
        if self.envelope_num_seqs > self.max_num_seqs:
            limits["max_num_active_seqs"] = self.max_num_seqs
        if self.envelope_batched_tokens > self.max_num_batched_tokens:
            limits["max_num_scheduled_tokens"] = self.max_num_batched_tokens
        return limits

    def _other_than_usual(self) -> dict[str, Any]:
        """Arguments that vLLM is given only where they are not its own defaults."""
        names = (
            "long_prefill_token_threshold",
            "long_prefill_token_threshold_adaptive",
            "scheduler_reserve_full_isl",
            "scheduling_policy",
            "block_size",
            "tensor_parallel_size",
        )
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) != usual[name]}
        if self.speculative_method != "none":
            chosen["speculative_config"] = self._speculative()
        return chosen

    def _speculative(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "method": self.speculative_method,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        if self.speculative_model is not None:
            config["model"] = self.speculative_model
        if self.speculative_method == "ngram":
            config["prompt_lookup_max"] = 4
        return config

    @property
    def live_slots(self) -> tuple[str, ...]:
        """The slots that POLYMORPH_DISABLE leaves on."""
        disabled = Disabled.read()
        return () if disabled.everything else tuple(name for name in self.slots if name not in disabled.slots)

    def arguments(self) -> dict[str, Any]:
        """The same with our slots. What is compiled depends on them, so vLLM's compile cache is told by
        `additional_config`.
        """
        if not (self.live_slots and on_cpu()):
            return self.plain_arguments()
        return {
            **self.plain_arguments(),
            "worker_extension_cls": EXTENSION,
            "additional_config": {"polymorph": f"{','.join(self.live_slots)}-{source_digest()}"},
        }

    def without_slots(self) -> "EngineLaunch":
        """Stock vLLM under the same launch."""
        return dataclasses.replace(self, slots=())

    def environment(self) -> dict[str, str]:
        """Variables to set before vLLM is imported; the engine's own process inherits them."""
        variables = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "POLYMORPH_SLOTS": ",".join(self.live_slots),
            "POLYMORPH_KEPT_WEIGHTS_MIB": str(self.kept_weights_mib),
            "POLYMORPH_PACKED_WEIGHTS_MIB": str(self.packed_weights_mib),
        }
        if on_cpu():
            variables["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_gib)
            variables["VLLM_CPU_OMP_THREADS_BIND"] = _by_rank(_cores(self.threads), self.tensor_parallel_size)
            # vLLM's ahead-of-time artifact of a CPU engine is saved and then refused (0.32.0), so every start compiled
            # anew. Inductor's own cache does load: 20 s instead of 100 s on two cores, shared by all engines here.
            variables["VLLM_USE_AOT_COMPILE"] = "0"
            graphs = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(cache_folder() / "inductor")
            variables["TORCHINDUCTOR_CACHE_DIR"] = graphs
            library = openmp_library()
            if library is not None:
                preloaded = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
                variables["LD_PRELOAD"] = ":".join(dict.fromkeys([*preloaded, str(library)]))
        return variables

    def in_process_environment(self) -> dict[str, str]:
        """The same for an engine within its caller's process (VLLM_ENABLE_V1_MULTIPROCESSING=0).

        vLLM binds the OpenMP threads of workers that it starts, and not those of its own process: there they float, two
        of them share a core for whole steps, and they spin for 200 ms after each. The values are those of vLLM's
        `OMPProcessManager` (0.32), so that such an engine runs as a worker's does.
        """
        variables = {**self.environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if on_cpu():
            cores = [str(core) for core in _cores(self.threads)]
            variables["OMP_NUM_THREADS"] = str(len(cores))
            if openmp_library() is not None:
                variables["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{','.join(cores)}]"
                variables |= {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
            else:
                variables["GOMP_CPU_AFFINITY"] = " ".join(cores)
        return variables

    def command_line(self, *, plain: bool = False) -> str:
        """A `vllm serve` line that starts the same by hand."""
        arguments = self.plain_arguments() if plain else self.arguments()
        model = arguments.pop("model")
        variables = {
            k: v for k, v in self.environment().items() if not (plain and k.startswith("POLYMORPH_"))
        }
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
        words += ["vllm", "serve", shlex.quote(model)]
        for name, value in arguments.items():
            words += _flag(name.replace("_", "-"), value)
        return " ".join(words)


def on_cpu() -> bool:
    """Whether the installed vLLM is the one for CPUs, told without importing it."""
    return importlib.util.find_spec("vllm") is None or _version_names_cpu()


@functools.cache  # it reads the metadata of every package, for as long as a second
def _version_names_cpu() -> bool:
    from importlib import metadata  # noqa: PLC0415

    names = set(metadata.packages_distributions().get("vllm", ()))
    return "vllm-cpu" in names or any("cpu" in metadata.version(name) for name in names)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return [f"--{name}", shlex.quote(text)]


def _by_rank(cores: list[int], ranks: int) -> str:
    """Each rank's own cores, as many for each.

    Raises:
        ValueError: there are fewer cores than ranks.
    """
    each = len(cores) // ranks
    if each == 0:
        raise ValueError(f"{ranks} ranks on {len(cores)} cores: a rank needs a core of its own")
    return "|".join(_ranges(cores[rank * each : (rank + 1) * each]) for rank in range(ranks))


def _ranges(cores: list[int]) -> str:
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
