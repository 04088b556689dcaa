"""The base of every service's settings object."""

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)


class NatsSettings(BaseModel):
    """How to reach NATS."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = "nats://127.0.0.1:4222"
    user: str | None = None
    password: SecretStr | None = None
    nkey_seed_file: Path | None = None
    inbox_prefix: str = "_INBOX"


class ServiceSettings(BaseSettings):
    """Frozen settings of one service; unknown keys are refused.

    A subclass names its section: `section="gateway"` reads `gateway:` of polymorph.yaml and `POLYMORPH_GATEWAY_<FIELD>`
    variables (nested fields with `__`). `POLYMORPH_CONFIG` names another file.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_nested_delimiter="__")

    instance: str = Field(default="0", description="tells two processes of one service apart")
    data_dir: Path = Field(default=Path(".polymorph"), description="where this service may keep files")
    log_level: str = "INFO"
    health_port: int = Field(
        default=0, description="serves /healthz, /readyz and /metrics on loopback; 0 is off"
    )
    health_host: str = "127.0.0.1"
    nats: NatsSettings = NatsSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del dotenv_settings, file_secret_settings
        return (init_settings, env_settings, _Section(settings_cls))

    def masked(self) -> dict[str, Any]:
        """What is printed at start: secrets masked."""
        return self.model_dump(mode="json")


class _Section(YamlConfigSettingsSource):
    """Reads the section of polymorph.yaml that is named like the service, beside the shared keys `nats` and so on."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        path = Path(os.environ.get("POLYMORPH_CONFIG", "polymorph.yaml"))
        super().__init__(settings_cls, yaml_file=path)
        prefix = str(settings_cls.model_config.get("env_prefix", ""))
        section = prefix.lower().removeprefix("polymorph_").strip("_")
        document = self.yaml_data
        shared = document.get("common", {}) or {}
        own = document.get(section, {}) or {}
        self.yaml_data = {**shared, **own}
        self.init_kwargs = self.yaml_data
