"""How far the start of an engine has come: known lines of its log, told in our words; any other line is left there."""

import re
from pathlib import Path

_TAIL_BYTES = 1 << 16
# In the order in which vLLM passes them; what a line says beyond that differs from release to release.
_PHASES = (
    (re.compile(r"\] Resolved architecture: "), "reading the model's configuration"),
    (re.compile(r"\] Initializing a V1 LLM engine "), "starting the engine's processes"),
    (re.compile(r"\] Starting to load model "), "loading the weights"),
    (re.compile(r"\] Loading weights took "), "weights loaded"),
    (re.compile(r"\] Warming up model for the compilation"), "compiling the model and warming it up"),
    (re.compile(r"\] Warming up done"), "warmed up, about to serve"),
    (re.compile(r"engine_lane: the evaluator's engine starts "), "starting the evaluator's engine"),
)


def phase(log: Path, since: int = 0) -> str:
    """The last phase that `log` tells after its first `since` bytes, or nothing."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        for pattern, text in _PHASES:
            if pattern.search(line):
                return text
    return ""
