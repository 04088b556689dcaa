"""Bundled texts by domain of content, and prompts of them that look like a pool's traffic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from polymorph.kernels.schema import Workload

_MOST_PREFILL = 1024  # tokens over all prompts of a batch
_LEAST_PROMPT = 8
_MOST_OUTPUT = 24  # steps: beside serving each takes a while, and activations of decode steps look alike
_LEAST_OUTPUT = 4
_LEVELS = (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99))

TEXTS: dict[str, tuple[str, ...]] = {
    "prose": (
        "The river rises in the hills north of the old town and reaches the sea after a journey of eighty miles.",
    ),
    "code": (
        "def merge(left, right):\n    result = []\n    while left and right:\n        result.append(",
        "SELECT customer, SUM(amount) FROM orders WHERE placed_at > '2026-01-01' GROUP BY customer",
    ),
    "questions": ("Question: why do the days grow shorter in autumn? Answer: because the axis of the earth",),
    "data": (
        '{"level": "info", "time": "2026-11-03T10:15:00Z", "message": "request finished", "status": 200}',
    ),
    "instructions": (
        "To make a simple bread, mix flour, water, salt and yeast, let the dough rest, and then",
    ),
    "letters": (
        "Dear committee, thank you for the invitation to speak about the history of the printing press.",
    ),
    "mathematics": (
        "The theorem follows by induction on the number of edges; for a single edge there is nothing to show.",
    ),
}


@dataclass(frozen=True, slots=True)
class Likeness:
    """What the engine is given so that its inputs look like the traffic's: for each request a domain and a length."""

    domains: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: int

    def about(self) -> dict[str, Any]:
        """As a Workload tells it."""
        share = 1 / len(self.domains)
        return {
            "domains": {name: self.domains.count(name) * share for name in dict.fromkeys(self.domains)},
            "prompt_tokens": list(self.prompt_tokens),
            "output_tokens": self.output_tokens,
        }


def likeness(workload: Workload, m: int, *, max_num_seqs: int, max_model_len: int) -> Likeness:
    """Requests whose steps compute about `m` tokens, with the domains and lengths that the workload's traffic had.

    Up to `max_num_seqs` it is that many sequences, which decode together; beyond it is the tokens of all prompts, which
    are computed in one step. A domain that no text is bundled for is left out; where none remains, all are taken.
    """
    told = dict((workload.x_polymorph.model_extra or {}).get("replay", {}))
    decodes = m <= max_num_seqs
    requests = max(1, m if decodes else min(max_num_seqs, 4))
    longest = max(_LEAST_PROMPT, max_model_len // 2)
    lengths = [
        min(longest, max(_LEAST_PROMPT, round(_quantile(dict(told.get("prompt_tokens") or {}), level))))
        for level in _levels(requests)
    ]
    most = _MOST_PREFILL if decodes else min(m, _MOST_PREFILL)
    if sum(lengths) > most or not decodes:
        scale = most / sum(lengths)
        lengths = [min(longest, max(_LEAST_PROMPT, round(length * scale))) for length in lengths]
    wanted = round(float(dict(told.get("output_tokens") or {}).get("p50") or _MOST_OUTPUT))
    output = max(_LEAST_OUTPUT, min(wanted, _MOST_OUTPUT, max_model_len - max(lengths) - 1))
    return Likeness(_spread(dict(told.get("domains") or {}), requests), tuple(lengths), output)


def written(like: Likeness, tokens: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """A prompt of its length for each request, of its domain's tokens, each beginning elsewhere."""
    return [
        ring(tokens[domain], index, length)
        for index, (domain, length) in enumerate(zip(like.domains, like.prompt_tokens, strict=True))
    ]


def ring(tokens: Sequence[int], index: int, length: int) -> list[int]:
    """`length` tokens that go round; no two of the first indices begin at the same place."""
    start = (index * 37 + index // len(tokens)) % len(tokens)
    turned = [*tokens[start:], *tokens[:start]]
    return (turned * (length // len(turned) + 1))[:length]


def _levels(count: int) -> list[float]:
    return [(index + 0.5) / count for index in range(count)]


def _quantile(told: Mapping[str, Any], level: float) -> float:
    """A distribution that is known by its quantiles, linear between them and flat beyond."""
    known = [(at, float(told[name])) for name, at in _LEVELS if told.get(name) is not None]
    if not known:
        return 32.0
    if level <= known[0][0]:
        return known[0][1]
    for (low, before), (high, after) in pairwise(known):
        if level <= high:
            return before + (after - before) * (level - low) / (high - low)
    return known[-1][1]


def _spread(shares: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """A domain for each request, by its share."""
    known = {
        name: float(share) for name, share in sorted(shares.items()) if name in TEXTS and float(share) > 0
    }
    weights = known or dict.fromkeys(TEXTS, 1.0)
    total = sum(weights.values())
    chosen = []
    for level in _levels(count):
        reached = 0.0
        for name, weight in weights.items():
            reached += weight / total
            if level <= reached + 1e-9:
                chosen.append(name)
                break
    return tuple(chosen)
