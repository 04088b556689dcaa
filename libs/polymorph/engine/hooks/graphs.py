"""VLLM's cache of compiled graphs is told which slots a graph was built with.

It knows models by their source and configuration, and not what a hook changed: an engine with slots would take a graph
that was compiled without them, in which no slot is ever called, and the other way round.
"""

import functools
import hashlib
from typing import Any

from polymorph.engine.hooks.hook import expect, expect_parameters


def probe() -> None:
    """The cache's key holds the hash of the whole configuration."""
    from vllm.config import VllmConfig  # noqa: PLC0415 - only an engine process has vLLM

    expect_parameters(expect(VllmConfig, "compute_hash"), "self")


def mark(slots: str) -> None:
    """From now on graphs of this process are cached under `slots` too."""
    from vllm.config import VllmConfig  # noqa: PLC0415

    native = VllmConfig.compute_hash

    @functools.wraps(native)
    def compute_hash(self: Any) -> str:
        key = str(native(self))
        return hashlib.sha256(f"{key} {slots}".encode()).hexdigest()[: len(key)]

    VllmConfig.compute_hash = compute_hash
