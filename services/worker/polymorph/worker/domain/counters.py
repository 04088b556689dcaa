"""Reading the slots' counters: what was spent on each operation, and what each artifact served."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Counters:
    """Totals since the engine started."""

    nanoseconds: Mapping[str, int]
    served: Mapping[str, int]
    errors: Mapping[str, int]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """From the answer of `slots_read`."""
        spent = {
            name: sum(tally["ns"] for tally in counts["by_m"].values())
            for name, counts in document["definitions"].items()
        }
        artifacts = document["artifacts"]
        return cls(
            nanoseconds=spent,
            served={digest: counts["served"]["calls"] for digest, counts in artifacts.items()},
            errors={digest: counts["errors"] for digest, counts in artifacts.items()},
        )

    def since(self, before: Self) -> Self:
        return type(self)(
            nanoseconds=_difference(self.nanoseconds, before.nanoseconds),
            served=_difference(self.served, before.served),
            errors=_difference(self.errors, before.errors),
        )


NOTHING = Counters(nanoseconds={}, served={}, errors={})


def _difference(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items()}
