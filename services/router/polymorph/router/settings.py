"""Settings of the router: section `router`, variables `POLYMORPH_ROUTER_<FIELD>`."""

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict
from redis.asyncio.connection import parse_url

from polymorph.config.settings import ServiceSettings


class RouterSettings(ServiceSettings):
    """How requests are placed and how traffic is folded. Times in seconds."""

    # An error must not print what was given: a URL may hold a password.
    model_config = SettingsConfigDict(env_prefix="POLYMORPH_ROUTER_", hide_input_in_errors=True)

    window_s: float = Field(default=5.0, gt=0, description="length of a traffic.shape-observed window")
    capacity_tokens_factor: float = Field(
        default=1.0, gt=0, description="tokens in flight a worker may have, as a share of its KV cache"
    )
    capacity_seqs_factor: float = Field(
        default=1.5, gt=0, description="requests in flight a worker may have, as a multiple of max_num_seqs"
    )
    default_output_tokens: int = Field(
        default=256, ge=1, description="counted where a request names no max_tokens"
    )
    reservation_ttl_s: float = Field(
        default=900.0, gt=0, description="a placed request that nobody reports as finished is dropped then"
    )
    hold_deadline_s: float = Field(default=60.0, gt=0, description="how long a request may be held")
    hold_heartbeat_s: float = Field(default=1.0, gt=0, description="how often a held request hears of us")
    hold_limit: int = Field(default=1024, ge=0, description="requests that may be held at once in a pool")
    worker_ttl_s: float = Field(
        default=15.0, gt=0, description="a worker without a heartbeat for so long is gone"
    )
    sticky_margin_tokens: int = Field(
        default=2048,
        ge=0,
        description="a program's request goes to the worker that served the program last, where its prefix is cached, "
        "unless that worker has so many tokens more in flight than the best; 0 places by load alone",
    )
    redis_url: SecretStr | None = Field(
        default=None,
        description="Valkey or Redis, through which router replicas share which worker served a program last; "
        "redis://, rediss:// or unix://; placement never waits for it and does without it",
    )

    @field_validator("redis_url")
    @classmethod
    def _reachable(cls, url: SecretStr | None) -> SecretStr | None:
        """Raises ValueError here, at start, for what the client would refuse later."""
        if url is not None:
            try:
                parse_url(url.get_secret_value())
            except ValueError:
                raise ValueError(
                    "wanted: redis://, rediss:// or unix://, with a port that is a number and special characters of "
                    "the password percent-encoded"
                ) from None
        return url
