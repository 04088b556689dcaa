"""Settings of the evaluator: section `evaluator`, variables `POLYMORPH_EVALUATOR_<FIELD>`."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from polymorph.config.settings import ServiceSettings
from polymorph.sandbox.isolation import Isolation, level_named


class EvaluatorSettings(ServiceSettings):
    """How candidates are judged. Times in seconds."""

    model_config = SettingsConfigDict(env_prefix="POLYMORPH_EVALUATOR_")

    model: Path | None = Field(
        default=None, description="folder of the model that the end-to-end gate runs; none: no such gate"
    )
    hardware: str = Field(
        default="auto", description="hardware class whose jobs are taken; auto is this machine's"
    )
    signing_key: Path = Field(
        default=Path(".polymorph/keys/evaluator.key"), description="Ed25519 key, made where it is missing"
    )
    min_isolation: str = Field(
        default="filtered", description="process, filtered or namespaced; less is refused"
    )
    threads: int = Field(
        default=0, ge=0, description="processors that kernels run on; 0 is all of this process"
    )
    processes: int = Field(default=5, ge=2, description="processes of the hierarchical design")
    loads: int = Field(default=5, ge=1, description="loads in each process")
    pairs: int = Field(default=4, ge=2, description="pairs for each load")
    margin: float = Field(default=0.01, ge=0, description="a micro-benchmark passes above 1 + margin")
    end_to_end_margin: float = Field(
        default=0.005, ge=0, description="an end-to-end replay passes above 1 + margin"
    )
    host_lease: str = Field(
        default="",
        description="workers that pause while timing runs: auto (all live ones on this host), ids with commas, or none",
    )
    host_wait_s: float = Field(
        default=30.0, gt=0, description="how long a worker may refuse before INCONCLUSIVE"
    )
    engine: bool = Field(default=True, description="whether the end-to-end gate has an engine of its own")
    engine_blocks: int = Field(
        default=20, ge=2, description="pairs of blocks that the end-to-end gate replays"
    )
    engine_max_model_len: int | None = Field(
        default=None,
        ge=64,
        description="as the workers', so that one compiled graph serves both; none: the model's",
    )
    engine_dtype: str = Field(
        default="auto", description="as the workers': kernels of another are refused by their engines"
    )
    engine_start_s: float = Field(default=600.0, gt=0, description="how long the engine may take to start")

    def isolation(self) -> Isolation:
        """Raises ValueError for an unknown level."""
        return level_named(self.min_isolation)
