"""What a plain `vllm serve` is told of hot loading, by its environment."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from polymorph.config.folders import state_folder
from polymorph.sandbox.isolation import Isolation, level_named

KERNELS_VARIABLE = "POLYMORPH_KERNELS"


@dataclass(frozen=True)
class PlainSettings:
    """`folder` is None where nothing is to be loaded."""

    folder: Path | None = None
    trust_file: Path | None = None
    pool: str | None = None
    min_isolation: Isolation = Isolation.FILTERED
    toolchains: frozenset[str] = frozenset()

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Raises ValueError for an unknown level of isolation."""
        given = os.environ if environment is None else environment
        folder, trust = given.get(KERNELS_VARIABLE), given.get("POLYMORPH_TRUST_FILE")
        toolchains = given.get("POLYMORPH_TOOLCHAINS", "").split(",")
        return cls(
            folder=Path(folder).resolve() if folder else None,
            trust_file=Path(trust) if trust else None,
            pool=given.get("POLYMORPH_POOL") or None,
            min_isolation=level_named(given.get("POLYMORPH_MIN_ISOLATION", "filtered")),
            toolchains=frozenset(name.strip() for name in toolchains if name.strip()),
        )

    @property
    def state(self) -> Path:
        """Where this server remembers: apart from the folder, which others write."""
        named = hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]
        return state_folder() / "plain" / named

    @property
    def flights(self) -> Path:
        """Where the engine's ranks record the kernel that they call."""
        return self.state / "flight"
