"""The end of the demo: a table for a person, one JSON object for a machine."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.demo.load import Tally
from benchmarks.demo.measure import Comparison
from benchmarks.demo.story import Story

from polymorph.events.values import Ratio


@dataclass(frozen=True)
class Result:
    """The last line of the demo."""

    requests: int
    failed: int
    truncated: int
    promotions: int
    numerics: str
    slot_baseline_ratio: float
    stolen_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    drift_to_promotion_s: float | None
    greedy_agreement: float
    greedy_agreement_incumbent: float

    @property
    def exit_code(self) -> int:
        """0 where the loop did what it promises; 3 where nothing beat the baseline; 1 where a request suffered."""
        if self.failed or self.truncated:
            return 1
        return 0 if self.promotions and self.speedup_low > 1.0 else 3

    def as_dict(self) -> dict[str, Any]:
        return {
            key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()
        }


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.point:.3f}x  [{ratio.low:.3f}, {ratio.high:.3f}]"


def tell(
    result: Result,
    tally: Tally,
    story: Story,
    comparisons: list[Comparison],
    *,
    again: str,
    say: Callable[[str], None],
) -> None:
    """Prints what happened, what was gained, and where each number can be seen again."""
    say("")
    say(f"requests sent {result.requests}, failed {result.failed}, truncated {result.truncated}")
    for error in {outcome.error for outcome in tally.outcomes if not outcome.ok}:
        say(f"  failed: {error}")
    for found in comparisons:
        say(
            f"{found.chats} chat(s) at once, {len(found.blocks) // 3} rounds of three blocks; medians, ratios with 95 % intervals:"
        )
        say(f"  {'':<28}{'tokens/s':>10}{'TPOT ms':>10}")
        for arm, name in (
            ("plain", "plain vLLM"),
            ("empty", "our engine, slots empty"),
            ("tuned", "our engine, tuned"),
        ):
            rates, steps = sorted(found.series(arm, "tokens_per_s")), sorted(found.series(arm, "tpot_s"))
            say(f"  {name:<28}{rates[len(rates) // 2]:>10.1f}{steps[len(steps) // 2] * 1000:>10.1f}")
        say(f"  tuned / plain vLLM    {_ratio(found.ratio('tuned', 'plain', 1))}")
        say(f"  tuned / slots empty   {_ratio(found.ratio('tuned', 'empty', 2))}")
        say(f"  slots empty / plain   {_ratio(found.ratio('empty', 'plain', 3))}")
    _promotions(story, say)
    say(
        f"greedy outputs equal: tuned and empty {result.greedy_agreement:.2f}; the engine with itself at another batch size "
        f"{result.greedy_agreement_incumbent:.2f}; numerics declared {result.numerics}"
    )
    say(f"host time that measurements took from serving: {result.stolen_s:.1f} s")
    say(f"see it again in the event stream: {again}")


def _promotions(story: Story, say: Callable[[str], None]) -> None:
    for event in story.promotions:
        data = event["data"]
        say(
            f"promoted (generation {data['generation']}, revision {data['revision']['revision']}): {data['reason']}"
        )
    seconds = story.drift_to_promotion_s()
    if seconds is not None:
        say(f"from drift to promotion: {seconds:.0f} s")
    if story.promotions:
        return
    say("nothing beat the baseline. The nearest candidates, and why each lost:")
    measured = [e["data"] for e in story.named("candidate.evaluated") if e["data"].get("speedup")]
    for data in sorted(measured, key=lambda d: -float(d["speedup"]["low"]))[:3]:
        say(f"  {data['candidate_id']} {data['speedup']['point']:.3f}x at {data['gate']}: {data['reason']}")
