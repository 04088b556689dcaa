"""The compiler's settings: `compiler:` in polymorph.yaml, or POLYMORPH_COMPILER_*."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from polymorph.config.settings import ServiceSettings
from polymorph.events.state import Mode


class CompilerSettings(ServiceSettings):
    """When traffic counts as changed, what a search may cost, and how winners go live. Times in seconds."""

    model_config = SettingsConfigDict(env_prefix="POLYMORPH_COMPILER_")

    database_url: str = Field(
        default="sqlite+aiosqlite:///.polymorph/polymorph.db",
        description="the record: sqlite+aiosqlite:///PATH or postgresql+asyncpg://user@host/name",
    )
    database_password_file: Path | None = Field(
        default=None, description="a file with the database's password, kept out of the URL"
    )
    signing_key: Path = Field(default=Path("promoter.key"), description="the promoter's private key")
    default_mode: Mode = Field(default=Mode.OBSERVE, description="the mode that a new pool starts in")
    mode: Mode | None = Field(
        default=None, description="the mode that a start puts every pool in; without it they keep theirs"
    )
    policy: Literal["direct"] = Field(
        default="direct",
        description="direct: all requests at once; growing shares need a measured canary, which nothing here takes yet",
    )
    hardware: str = Field(
        default="auto", description="hardware class that searches are for; auto is that of this machine"
    )

    drift_threshold: float = Field(default=1.5, gt=0, description="distance from which a shape differs")
    drift_windows: int = Field(default=3, ge=1, description="judgements in a row beyond the threshold")
    min_requests: int = Field(default=16, ge=1, description="requests that a shape is judged over")
    window_age_s: float = Field(default=120.0, gt=0, description="windows older than this are not judged")
    cooldown_s: float = Field(default=60.0, ge=0, description="rest between two plans")

    candidates_per_search: int = Field(default=24, ge=1)
    search_seconds: float = Field(default=600.0, gt=0, description="no new candidate is sent after this")
    searches_per_drift: int = Field(default=6, ge=1)
    in_flight: int = Field(default=2, ge=1, description="evaluations ordered ahead of their answers")
    margin: float = Field(
        default=0.01, ge=0, description="a first look must be faster by this to be confirmed"
    )
    least_gain: float = Field(
        default=0.005, ge=0, description="share of step time that a search must be able to win"
    )
    largest_m: int = Field(
        default=32,
        ge=1,
        description="no search beyond so many tokens in a step: what the evaluator's engine decodes together",
    )
    evaluation_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="first wait for an answer; then twice that, and twice again; then none is expected",
    )
    tick_s: float = Field(default=1.0, gt=0)

    @field_validator("mode", mode="before")
    @classmethod
    def _not_given(cls, value: Any) -> Any:
        """An empty variable is what a compose file passes on where nobody named a mode."""
        return None if value == "" else value
