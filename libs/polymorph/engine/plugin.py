"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`): inert until one of our calls comes."""

from polymorph.engine import core, draft
from polymorph.engine.disable import Disabled
from polymorph.engine.plain import front


def register() -> None:
    """Called once in a front process, an engine core and a worker; more than once where vLLM loads plugins again."""
    if Disabled.read().everything:
        return
    from polymorph.engine import resume  # noqa: PLC0415 - torch, which a process that loads this has by now

    resume.install()
    core.install()
    draft.install()
    front.install()
