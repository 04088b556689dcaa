"""What an end-to-end replay runs, scaled from the captured workload to what fits beside serving."""

from dataclasses import dataclass

from polymorph.evaluator.domain.texts import ring
from polymorph.kernels.buckets import bucket, lower_bound
from polymorph.kernels.schema import Workload

_MOST_PREFILL = 1024  # tokens over all prompts of a batch
_LEAST_PROMPT = 8


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
    return [ring(flat, index, length) for index in range(count)]
