"""Settings of the gateway: section `gateway`, variables `POLYMORPH_GATEWAY_<FIELD>`."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from polymorph.config.settings import ServiceSettings


class GatewaySettings(ServiceSettings):
    """Where the gateway listens and how patient it is. Times in seconds."""

    model_config = SettingsConfigDict(env_prefix="POLYMORPH_GATEWAY_")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    workers: tuple[str, ...] = Field(default=(), description="urls of workers that no registry tells of")
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1)
    attempts: int = Field(default=3, ge=1, description="workers tried before the first byte")
    drain_timeout_s: float = Field(default=60.0, ge=0, description="what requests in flight get at SIGTERM")
    client_keep_alive_s: int = Field(default=75, ge=1)

    router_first_answer_s: float = Field(default=0.15, gt=0, description="then we place by ourselves")
    router_probe_s: float = Field(default=0.25, gt=0, description="how often a router that is away is tried")

    connect_timeout_s: float = Field(default=2.0, gt=0)
    upstream_idle_s: float = Field(
        default=3.0, gt=0, lt=5, description="idle connections are closed before workers close them (5 s)"
    )

    probe_interval_s: float = Field(default=1.0, gt=0, description="how often suspects are looked at")
    probe_timeout_s: float = Field(default=2.0, gt=0)
    suspect_after_s: float = Field(default=12.0, gt=0, description="a worker silent for so long is probed")
    forget_after_s: float = Field(default=600.0, gt=0, description="a dead worker is forgotten then")

    event_heartbeat_s: float = Field(default=15.0, gt=0, description="comments that keep /v1/events open")
