"""POLYMORPH_DISABLE: stock code everywhere (`1`), or where the slots that it names would be (`linear,moe`)."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

VARIABLE = "POLYMORPH_DISABLE"
STOCK = f"{VARIABLE} is set: this engine runs stock code"


@dataclass(frozen=True)
class Disabled:
    """What the environment switches off."""

    everything: bool = False
    slots: frozenset[str] = frozenset()

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Self:
        """From the variable; `0` and `false` switch nothing off."""
        found = (os.environ if environment is None else environment).get(VARIABLE, "").strip()
        if found.lower() in {"", "0", "false"}:
            return cls()
        if found.lower() in {"1", "true", "all"}:
            return cls(everything=True)
        return cls(slots=frozenset(name.strip() for name in found.split(",") if name.strip()))

    def check(self, known: Collection[str]) -> None:
        """A switch that is misspelt must not seem to work.

        Raises:
            ValueError: a slot that does not exist.
        """
        unknown = ", ".join(sorted(self.slots - set(known)))
        if unknown:
            raise ValueError(
                f"{VARIABLE} names {unknown}: use 1 for stock code everywhere, or some of {', '.join(known)}"
            )
