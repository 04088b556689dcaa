"""Where slots are put into vLLM. Written against the releases that docs/compatibility.md lists."""

from polymorph.engine.hooks import activation, attention, linear, moe, norms, rotary, sampling
from polymorph.engine.hooks.hook import Hook, HookMissing

__all__ = ["HOOKS", "Hook", "HookMissing"]

_ALL = (
    linear.HOOK,
    norms.HOOK,
    activation.HOOK,
    rotary.HOOK,
    moe.HOOK,
    attention.HOOK,
    sampling.HOOK,
)
HOOKS: dict[str, Hook] = {hook.name: hook for hook in _ALL}
