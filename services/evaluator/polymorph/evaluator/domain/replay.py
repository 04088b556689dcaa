"""What an end-to-end replay runs, scaled from the captured workload to what fits beside serving."""

from dataclasses import dataclass

from polymorph.kernels.buckets import bucket, lower_bound
from polymorph.kernels.schema import Workload

_MOST_PREFILL = 1024  # tokens over all prompts of a batch
_LEAST_PROMPT = 8

TEXTS = (
    "The river rises in the hills north of the old town and reaches the sea after a journey of eighty miles.",
    "def merge(left, right):\n    result = []\n    while left and right:\n        result.append(",
    "Question: why do the days grow shorter in autumn? Answer: because the axis of the earth",
    '{"level": "info", "time": "2026-11-03T10:15:00Z", "message": "request finished", "status": 200}',
    "To make a simple bread, mix flour, water, salt and yeast, let the dough rest, and then",
    "SELECT customer, SUM(amount) FROM orders WHERE placed_at > '2026-01-01' GROUP BY customer",
    "Dear committee, thank you for the invitation to speak about the history of the printing press.",
    "The theorem follows by induction on the number of edges; for a single edge there is nothing to show.",
)


@dataclass(frozen=True, slots=True)
class Replay:
    """A batch of `requests` prompts of `prompt_tokens`, decoded together: M is their number."""

    requests: int
    prompt_tokens: int
    served: bool


def replay(workload: Workload, heaviest: int, *, max_num_seqs: int, max_model_len: int) -> Replay:
    """The batch whose decode steps have the M that matters; `served` is False where no decode step reaches it."""
    extra = dict((workload.x_polymorph.model_extra or {}).get("replay", {}))
    concurrency = round(float(extra.get("concurrency") or 0))
    within = lower_bound(bucket(heaviest)) <= concurrency <= heaviest
    wanted = concurrency if within else heaviest
    requests = max(1, min(wanted, max_num_seqs))
    asked = int(dict(extra.get("prompt_tokens") or {}).get("p50") or 32)
    prompt = max(_LEAST_PROMPT, min(asked, _MOST_PREFILL // requests, max_model_len // 2))
    return Replay(requests, prompt, served=wanted <= max_num_seqs)


def prompts(tokens: list[list[int]], count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens, each beginning elsewhere, so that no two share a prefix."""
    flat = [token for text in tokens for token in text]
    made = []
    for index in range(count):
        start = (index * 37 + index // len(flat)) % len(flat)
        ring = flat[start:] + flat[:start]
        made.append((ring * (length // len(ring) + 1))[:length])
    return made
