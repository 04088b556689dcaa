"""Reading the slots' counters: what was spent on each operation, and what each artifact served."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from polymorph.events.values import SlotHits
from polymorph.kernels.buckets import lower_bound


@dataclass(frozen=True)
class Counters:
    """Totals since the engine started."""

    nanoseconds: Mapping[str, Mapping[str, int]]
    """Definition -> bucket of M -> time of its calls."""
    calls: Mapping[str, Mapping[str, int]]
    """Definition -> bucket of M -> calls, by whatever code."""
    served: Mapping[str, int]
    errors: Mapping[str, int]
    served_by_m: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Artifact -> bucket of M -> calls that it served."""
    sampled: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bucket of M of a step -> family of operators -> time of those in profiled steps."""
    sampled_steps: Mapping[str, int] = field(default_factory=dict)
    experts: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Definition -> of each layer, tokens by expert; only where there are experts."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """From the answer of `slots_read`."""
        definitions = document["definitions"]
        artifacts = document["artifacts"]
        return cls(
            nanoseconds={name: _tallied(counts, "ns") for name, counts in definitions.items()},
            calls={name: _tallied(counts, "calls") for name, counts in definitions.items()},
            served={digest: counts["served"]["calls"] for digest, counts in artifacts.items()},
            errors={digest: counts["errors"] for digest, counts in artifacts.items()},
            served_by_m={digest: _tallied(counts, "calls") for digest, counts in artifacts.items()},
            sampled={m: regime["families"] for m, regime in document["steps"].items()},
            sampled_steps={m: regime["sampled_steps"] for m, regime in document["steps"].items()},
            experts={
                name: tuple(tuple(layer) for layer in counts["experts"])
                for name, counts in definitions.items()
                if "experts" in counts
            },
        )

    def since(self, before: Self) -> Self:
        return type(self)(
            nanoseconds=_differences(self.nanoseconds, before.nanoseconds),
            calls=_differences(self.calls, before.calls),
            served=_difference(self.served, before.served),
            errors=_difference(self.errors, before.errors),
            served_by_m=_differences(self.served_by_m, before.served_by_m),
            sampled=_differences(self.sampled, before.sampled),
            sampled_steps=_difference(self.sampled_steps, before.sampled_steps),
            experts={
                name: _layers_since(layers, before.experts.get(name, ()))
                for name, layers in self.experts.items()
            },
        )

    def called(self, definition: str, min_m: int, max_m: int) -> int:
        """Calls of `definition` in the buckets that lie within `min_m` and `max_m`."""
        return sum(
            count
            for upper, count in self.calls.get(definition, {}).items()
            if min_m <= lower_bound(int(upper)) and int(upper) <= max_m
        )


def hits(counters: Counters, engaged: Iterable[tuple[str, str]]) -> tuple[SlotHits, ...]:
    """By slot; `engaged` are pairs of definition and artifact."""
    kernels: dict[str, dict[str, dict[str, int]]] = {}
    for definition, artifact in engaged:
        kernels.setdefault(definition, {})[artifact] = dict(counters.served_by_m.get(artifact, {}))
    return tuple(
        SlotHits(definition=name, calls=dict(calls), by_kernel=kernels.get(name, {}))
        for name, calls in sorted(counters.calls.items())
    )


NOTHING = Counters(nanoseconds={}, calls={}, served={}, errors={})


def _tallied(counts: Mapping[str, Any], what: str) -> dict[str, int]:
    return {upper: tally[what] for upper, tally in counts["by_m"].items()}


def _differences(
    now: Mapping[str, Mapping[str, int]], before: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    return {name: _difference(counts, before.get(name, {})) for name, counts in now.items()}


def _difference(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items()}


def _layers_since(
    now: tuple[tuple[int, ...], ...], before: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    if len(now) != len(before):
        return now
    return tuple(
        tuple(count - earlier for count, earlier in zip(layer, last, strict=True))
        for layer, last in zip(now, before, strict=True)
    )
