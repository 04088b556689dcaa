"""What changed between two shapes, in plain words."""

from polymorph.events.values import TrafficShape
from polymorph.kernels.buckets import UPPER_BOUNDS, lower_bound
from polymorph.traffic.distance import Distance

_WORTH_SAYING = 0.15


def never_tuned(observed: TrafficShape) -> str:
    """The reason of a first search."""
    return (
        f"This pool was never tuned; it now sees prompts of {_tokens(observed.prompt_tokens.p50)} and outputs of"
        f" {_tokens(observed.output_tokens.p50)} (medians) with {observed.concurrency:.1f} requests in flight."
    )


def why(tuned_for: TrafficShape, observed: TrafficShape, parts: Distance) -> str:
    """One sentence that names what moved, the largest part first."""
    said = [
        (
            parts.prompt,
            f"prompts went from {_change(tuned_for.prompt_tokens.p50, observed.prompt_tokens.p50)}",
        ),
        (
            parts.output,
            f"outputs went from {_change(tuned_for.output_tokens.p50, observed.output_tokens.p50)}",
        ),
        (
            parts.concurrency,
            f"requests in flight went from {tuned_for.concurrency:.1f} to {observed.concurrency:.1f}",
        ),
        (
            parts.prefix,
            f"the prefix hit rate went from {tuned_for.prefix_hit_rate:.0%} to {observed.prefix_hit_rate:.0%}",
        ),
        (2 * (parts.steps or 0.0), _steps(tuned_for.tokens_per_step, observed.tokens_per_step)),
    ]
    ranked = sorted(said, key=lambda item: -item[0])
    phrases = [phrase for part, phrase in ranked if phrase and part >= _WORTH_SAYING] or [ranked[0][1]]
    return f"Since the last tuning {', '.join(phrases[:-1])}{' and ' if phrases[1:] else ''}{phrases[-1]}."


def _change(before: float, after: float) -> str:
    return f"{before:,.0f} to {_tokens(after)} (median)"


def _tokens(value: float) -> str:
    return f"{value:,.0f} token{'' if round(value) == 1 else 's'}"


def _steps(before: dict[str, float], after: dict[str, float]) -> str:
    keys = before.keys() | after.keys()
    if not before or not after:
        return ""
    moved = max(sorted(keys), key=lambda key: after.get(key, 0.0) - before.get(key, 0.0))
    return (
        f"steps of {_bucket(moved)} went from {before.get(moved, 0.0):.0%} to {after.get(moved, 0.0):.0%}"
        " of engine time"
    )


def _bucket(key: str) -> str:
    upper = int(key) if key.isdigit() else 0
    if upper not in UPPER_BOUNDS:
        return f"{key} tokens"
    lower = lower_bound(upper)
    return _tokens(upper) if lower == upper else f"{lower:,} to {upper:,} tokens"
