"""Real request traces, scaled to the machine: lengths and arrivals shrink, their distributions and order stay."""

import csv
import inspect
import json.decoder
import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TRACES = Path(__file__).resolve().parent.parent / "traces"
_CHARS_PER_TOKEN = {"chat": 4.0, "code": 3.0}
_TOPICS = (
    "the history of bridges",
    "how bread rises",
    "a walk through an old harbour",
    "why the sky is blue",
    "keeping bees in a city",
    "learning to play the cello",
    "the rules of chess",
    "packing for a week in the mountains",
)


@dataclass(frozen=True)
class Scale:
    """Divisors for lengths in tokens, and the factor that stretches time; bounds keep a step affordable and a pause
    in the trace from becoming minutes.
    """

    prompt: float
    output: float
    stretch: float
    max_prompt: int = 256
    max_output: int = 96
    longest_gap_s: float = 5.0


@dataclass(frozen=True)
class TraceRequest:
    """One request to send `at_s` seconds after the phase begins."""

    at_s: float
    prompt: str
    max_tokens: int
    domain: str


def requests(name: str, scale: Scale, *, seed: int) -> Iterator[TraceRequest]:
    """The rows of `azure_2023_<name>_sample.csv` in their order."""
    rng = random.Random(seed)
    domain = "code" if name == "code" else "chat"
    with (TRACES / f"azure_2023_{name}_sample.csv").open() as file:
        rows = csv.reader(line for line in file if not line.startswith("#"))
        next(rows)
        at_s = before = 0.0
        for at, prompt, output in rows:
            at_s += min((float(at) - before) * scale.stretch, scale.longest_gap_s)
            before = float(at)
            prompt_tokens = min(scale.max_prompt, max(8, round(int(prompt) / scale.prompt)))
            yield TraceRequest(
                at_s=at_s,
                prompt=_text(domain, prompt_tokens, rng),
                max_tokens=min(scale.max_output, max(4, round(int(output) / scale.output))),
                domain=domain,
            )


def _text(domain: str, tokens: int, rng: random.Random) -> str:
    """A prompt of about that many tokens: a question with context for chat, a piece of a module for code."""
    size = int(tokens * _CHARS_PER_TOKEN[domain])
    if domain == "code":
        source = inspect.getsource(json.decoder)
        start = rng.randrange(max(1, len(source) - size))
        return f"Complete this code:\n{source[start : start + size]}"
    topic = rng.choice(_TOPICS)
    context = f"I have been reading about {topic}, and number {rng.randrange(10_000)} on my list is this. "
    return textwrap.shorten(f"Tell me about {topic}. " + context * (size // len(context) + 1), max(size, 40))
