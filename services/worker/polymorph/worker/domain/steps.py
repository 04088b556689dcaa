"""Engine steps folded into one report a second."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field

from polymorph.engine.loading.counters import Counters
from polymorph.events.types import StepsCounted
from polymorph.events.values import Operation, SampledSteps
from polymorph.kernels.buckets import bucket


@dataclass(frozen=True)
class Load:
    """What the scheduler said last."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0


@dataclass
class StepTally:
    """Counts since the last report."""

    steps: int = 0
    step_s: float = 0.0
    tokens: int = 0
    output_tokens: int = 0
    load: Load = Load()
    by_m: dict[str, float] = field(default_factory=dict)

    def step(self, tokens: int, seconds: float) -> None:
        """One engine step that computed `tokens` tokens."""
        self.steps += 1
        self.step_s += seconds
        self.tokens += tokens
        name = str(bucket(max(tokens, 1)))
        self.by_m[name] = self.by_m.get(name, 0.0) + seconds

    def report(
        self,
        *,
        pool: str,
        worker_id: str,
        at: dt.datetime,
        interval_s: float,
        counted: Counters,
        revision: str,
    ) -> StepsCounted:
        """The report; `counted` is what the slots counted in the same interval. Counting starts anew."""
        report = StepsCounted(
            pool=pool,
            worker_id=worker_id,
            at=at,
            interval_s=interval_s,
            steps=self.steps,
            step_s=self.step_s,
            tokens=self.tokens,
            output_tokens=self.output_tokens,
            running=self.load.running,
            waiting=self.load.waiting,
            kv_used=self.load.kv_used,
            step_s_by_m=dict(self.by_m),
            operations=shares(counted, self.step_s),
            revision=revision,
            sampled_by_m=sampled(counted),
        )
        self.steps, self.step_s, self.tokens, self.output_tokens = 0, 0.0, 0, 0
        self.by_m.clear()
        return report


def sampled(counted: Counters) -> dict[str, SampledSteps]:
    """What the profiled steps among those counted tell, by their number of tokens."""
    return {
        m: SampledSteps(
            steps=steps,
            seconds={family: ns / 1e9 for family, ns in counted.sampled.get(m, {}).items() if ns > 0},
        )
        for m, steps in counted.sampled_steps.items()
        if steps > 0
    }


def shares(counted: Counters, step_s: float) -> tuple[Operation, ...]:
    """Operations by their share of engine step time, the largest first."""
    if step_s <= 0:
        return ()
    found = (
        _operation(name, spent, step_s, counted.experts.get(name, ()))
        for name, spent in counted.nanoseconds.items()
    )
    return tuple(sorted((each for each in found if each.share > 0), key=lambda operation: -operation.share))


def _operation(
    name: str, spent: Mapping[str, int], step_s: float, layers: tuple[tuple[int, ...], ...]
) -> Operation:
    share = sum(spent.values()) / 1e9 / step_s
    # A step that ends between two reports lends its calls to the earlier one: never more than all of the time.
    held = min(1.0, share) / share if share else 0.0
    by_m = {upper: held * ns / 1e9 / step_s for upper, ns in spent.items() if ns > 0}
    return Operation(definition=name, share=min(1.0, share), by_m=by_m, experts=histogram(layers))


def histogram(layers: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
    """Shares of the token-expert pairs, the busiest expert of each layer first.

    What costs time is how uneven the load of a layer is. Each layer has other busy experts: added up by number, all
    would look even.
    """
    ranked = [sorted(layer, reverse=True) for layer in layers]
    by_rank = [sum(tokens) for tokens in zip(*ranked, strict=True)]
    total = sum(by_rank)
    return tuple(tokens / total for tokens in by_rank) if total else ()
