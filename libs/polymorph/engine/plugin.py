"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`): inert until one of our calls comes."""

import os

from polymorph.engine import core, draft

DISABLE_VARIABLE = "POLYMORPH_DISABLE"


def disabled() -> bool:
    """Whether stock vLLM is asked for."""
    return os.environ.get(DISABLE_VARIABLE, "") in {"1", "true"}


def register() -> None:
    """Called once in a front process, an engine core and a worker; more than once where vLLM loads plugins again."""
    if disabled():
        return
    from polymorph.engine import resume  # noqa: PLC0415 - torch, which a process that loads this has by now

    resume.install()
    core.install()
    draft.install()
