"""The measurement at the end: three engines' worth of the same work in blocks that alternate at random.

Arms: `plain` is vLLM without our extension under the same launch, a server of its own; `empty` and `tuned` are one
engine, the worker's, whose slots are switched between blocks. Blocks of a round stand next to each other in time, so a
ratio is taken within a round and machine drift falls out (polymorph.stats).
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.demo.load import Client, Outcome

from polymorph.events.values import Ratio
from polymorph.stats.blocks import paired_ratio

_REST_S = 1.2  # a plain vLLM engine polls with a whole core for a second after its last step
ARMS = ("plain", "empty", "tuned")


@dataclass(frozen=True)
class Block:
    """One block of one arm."""

    arm: str
    tokens_per_s: float
    tpot_s: float


@dataclass(frozen=True)
class Comparison:
    """What the rounds say, per number of chats."""

    chats: int
    blocks: tuple[Block, ...]

    def series(self, arm: str, field: str) -> list[float]:
        return [getattr(block, field) for block in self.blocks if block.arm == arm]

    def ratio(self, above: str, below: str, seed: int) -> Ratio:
        """Tokens per second of `above` over `below`, paired by round."""
        rate = "tokens_per_s"
        return paired_ratio(self.series(below, rate), self.series(above, rate), np.random.default_rng(seed))


async def block(
    client: Client, arm: str, prompts: Sequence[str], max_tokens: int
) -> tuple[Block, list[Outcome]]:
    """All prompts at once, each `max_tokens` long. Raises `RuntimeError` where one fails: a broken block is no block."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    outcomes = await asyncio.gather(*(client.chat(prompt, max_tokens) for prompt in prompts))
    took = loop.time() - begun
    if bad := [o for o in outcomes if not o.ok or o.truncated]:
        raise RuntimeError(f"{arm}: {len(bad)} of {len(outcomes)} requests of a block failed: {bad[0].error}")
    steps = [o.tpot_s for o in outcomes if o.tpot_s is not None]
    return Block(arm, sum(o.tokens for o in outcomes) / took, sum(steps) / len(steps)), list(outcomes)


async def compare(
    clients: dict[str, Client],
    switch: Callable[[str], Awaitable[None]],
    *,
    chats: int,
    max_tokens: int,
    rounds: int,
    seed: int,
    say: Callable[[str], None],
) -> Comparison:
    """Runs `rounds` rounds of the three arms in random order; the same prompts within a round, others between rounds."""
    rng = random.Random(seed)
    blocks: list[Block] = []
    for number in range(rounds + 1):
        prompts = [
            f"Question {rng.randrange(10**6)}: tell me a story about a fox, a river and the number {i}."
            for i in range(chats)
        ]
        for arm in rng.sample(ARMS, len(ARMS)):
            if arm != "plain":
                await switch(arm)
            await asyncio.sleep(_REST_S)
            measured, _ = await block(clients[arm], arm, prompts, max_tokens)
            if number:  # the first round warms every arm up
                blocks.append(measured)
        say(f"round {number}/{rounds} at {chats} chats")
    return Comparison(chats, tuple(blocks))


def same_text(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> float:
    """Share of requests with the same greedy text."""
    return sum(a.text == b.text for a, b in zip(ours, theirs, strict=True)) / len(ours)
