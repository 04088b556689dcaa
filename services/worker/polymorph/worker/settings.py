"""Settings of a worker: section `worker`, variables `POLYMORPH_WORKER_<FIELD>`."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from polymorph.config.settings import ServiceSettings
from polymorph.engine.launch import DEFAULT_SLOTS, EngineLaunch
from polymorph.events.subjects import is_token, pool_id
from polymorph.sandbox.isolation import Isolation, level_named


class WorkerSettings(ServiceSettings):
    """One engine and what it serves. Times in seconds, memory in GiB or MiB."""

    model_config = SettingsConfigDict(env_prefix="POLYMORPH_WORKER_")

    worker_id: str = Field(default="worker-0", pattern=r"^[A-Za-z0-9_-]+$")
    host: str = "127.0.0.1"
    port: int = Field(default=8100, ge=1, le=65535)
    advertise_url: str | None = Field(default=None, description="where others reach us; from host and port")
    model: Path = Field(description="a folder that vLLM serves")
    served_model_name: str | None = Field(
        default=None, description="what clients call the model; the folder's name"
    )
    pool: str | None = Field(default=None, description="from the served name")
    dtype: str = Field(
        default="auto", description="bfloat16 where the processor computes in it, else float32"
    )
    max_model_len: int | None = Field(default=None, ge=16)
    max_num_seqs: int = Field(default=32, ge=1)
    max_num_batched_tokens: int = Field(default=512, ge=1)
    envelope_num_seqs: int = Field(
        default=64, ge=0, description="what the engine is built for; below it max_num_seqs changes live"
    )
    envelope_batched_tokens: int = Field(default=1024, ge=0, description="the same of max_num_batched_tokens")
    kv_gib: int = Field(default=1, ge=1)
    spare_gib: float = Field(
        default=0.5,
        ge=0,
        description="left free when a second engine is warmed beside the first; else a restart",
    )
    threads: int = Field(default=0, ge=0, description="0 binds every core that this process may use")
    enforce_eager: bool = Field(default=False, description="no compilation: quick to start, slow to serve")
    slots: str = Field(
        default=",".join(DEFAULT_SLOTS),
        description="comma-separated names of slots (docs/architecture.md lists them); empty for none",
    )
    kept_weights_mib: int = Field(default=4096, ge=0)
    packed_weights_mib: int = Field(default=4096, ge=0)
    trust_file: Path | None = Field(
        default=None, description="public keys of evaluators and promoters; without it nothing is loaded"
    )
    capture: Literal["off", "content"] = Field(
        default="off",
        description="content: inputs of slots, which derive from users' text, may be captured and sent; they expire",
    )
    min_isolation: str = Field(
        default="filtered",
        description="of kernels' self-tests: process, filtered or namespaced; less is refused",
    )
    toolchains: str = Field(
        default="", description="digests of compilers whose kernels are taken, with commas; empty takes any"
    )
    drain_timeout_s: float = Field(default=60.0, ge=0)
    hang_timeout_s: float = Field(
        default=20.0, gt=0, description="a kernel call that takes longer is ended with its engine"
    )
    hold_timeout_s: float = Field(
        default=120.0, gt=0, description="how long newcomers wait while the engine is replaced, before a 503"
    )

    def served_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    def pool_name(self) -> str:
        """The pool's id.

        Raises:
            ValueError: a pool that cannot stand in a subject.
        """
        name = self.pool or pool_id(self.served_name())
        if not is_token(name):
            raise ValueError(f"pool {name!r}: use only A-Z a-z 0-9 _ and -")
        return name

    def check(self) -> None:
        """What can be told before anything starts.

        Raises:
            ValueError: a setting that cannot work, and what would.
        """
        self.pool_name()
        self.isolation()
        if not (self.model / "config.json").exists():
            raise ValueError(f"{self.model} is no model folder: it has no config.json")
        if self.trust_file is not None and not self.trust_file.exists():
            raise ValueError(f"trust file {self.trust_file} does not exist")

    def isolation(self) -> Isolation:
        """Raises ValueError for an unknown level."""
        return level_named(self.min_isolation)

    def trusted_toolchains(self) -> frozenset[str]:
        return frozenset(name.strip() for name in self.toolchains.split(",") if name.strip())

    def url(self) -> str:
        return (self.advertise_url or f"http://{self.host}:{self.port}").rstrip("/")

    def slot_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.slots.split(",") if name.strip())

    def launch(self) -> EngineLaunch:
        return EngineLaunch(
            model=self.model,
            dtype=self.dtype,
            served_model_name=self.served_name(),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            envelope_num_seqs=self.envelope_num_seqs,
            envelope_batched_tokens=self.envelope_batched_tokens,
            kv_gib=self.kv_gib,
            threads=self.threads,
            enforce_eager=self.enforce_eager,
            slots=self.slot_names(),
            kept_weights_mib=self.kept_weights_mib,
            packed_weights_mib=self.packed_weights_mib,
        )
