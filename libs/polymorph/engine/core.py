"""What the scheduler's process answers: settings read and set between two steps, and the salt of the prefix cache.

`plugin.register` adds these to vLLM's EngineCore; nothing changes until one is called through `call_utility_async`.
A refusal is an answer ({"ok": False, "reason": ...}), never an exception.
"""

import sys
import time
from typing import Any

from polymorph.engine.knobs import KNOBS, Refusal, envelope

SETTINGS_CALL = "polymorph_settings"
SET_CALL = "polymorph_set"
SALT_CALL = "polymorph_salt"
_CORE = "vllm.v1.engine.core"


def install() -> None:
    """Adds the calls to EngineCore, where this process has one; more than once does no harm."""
    module = sys.modules.get(_CORE)
    core = getattr(module, "EngineCore", None)
    if core is None:
        return
    core.polymorph_settings = polymorph_settings
    core.polymorph_set = polymorph_set
    core.polymorph_salt = polymorph_salt


def polymorph_settings(core: Any) -> dict[str, Any]:
    """What the scheduler works with now, what it may be set to, which settings this vLLM does not let be set, the
    salt, the number of steps, and the engine's own configuration.
    """
    missing: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for name, knob in KNOBS.items():
        try:
            settings[name] = knob.read(core)
        except AttributeError as error:
            missing[name] = str(error)
    return {
        "settings": settings,
        "envelope": envelope(core),
        "missing": missing,
        "salt": getattr(core, "polymorph_salted", None),
        "step": getattr(core.scheduler, "current_step", None),
        "config": _config(core),
    }


def polymorph_set(core: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Sets all of `changes` or none; answers what held before and what holds now."""
    began = time.perf_counter()
    try:
        before = _set(core, changes)
    except Refusal as refusal:
        return {"ok": False, "reason": str(refusal), **polymorph_settings(core)}
    seconds = time.perf_counter() - began
    return {"ok": True, "reason": "", "before": before, "seconds": seconds, **polymorph_settings(core)}


def polymorph_salt(core: Any, revision: str | None) -> dict[str, Any]:
    """From now on requests neither read nor write prefix cache of another `revision`; None is the unsalted cache.

    A request that has computed nothing yet counts as new. Those that run keep the cache that they began with.
    """
    needed = ("preprocess_add_request", "add_request", "scheduler")
    missing = [name for name in needed if not hasattr(core, name)]
    if missing or not hasattr(core.scheduler, "requests"):
        return {"ok": False, "reason": f"this vLLM's EngineCore has no {', '.join(missing) or 'requests'}"}
    core.polymorph_salted = revision
    if "preprocess_add_request" not in vars(core):
        _salt_newcomers(core)
    for request in core.scheduler.requests.values():
        if request.num_computed_tokens == 0 and not request.num_output_tokens:
            _resalt(request, revision)
    return {"ok": True, "reason": "", "salt": revision}


def _set(core: Any, changes: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(changes) - set(KNOBS))
    if unknown:
        raise Refusal(f"{', '.join(unknown)} cannot be set live; {', '.join(KNOBS)} can")
    before: dict[str, Any] = {}
    for name in changes:
        try:
            before[name] = KNOBS[name].read(core)
        except AttributeError as error:
            raise Refusal(f"{name} cannot be set in this vLLM: {error}") from error
    now = {name: knob.read(core) for name, knob in KNOBS.items() if knob.there(core)}
    wanted = {**now, **changes}
    for name in changes:
        KNOBS[name].check(wanted, envelope(core))
    for name, value in changes.items():
        KNOBS[name].write(core, value)
    return before


def _config(core: Any) -> dict[str, Any]:
    """The engine's own configuration, for a receipt after an engine was started anew."""
    config = core.vllm_config
    scheduler, cache, model = config.scheduler_config, config.cache_config, config.model_config
    speculative = config.speculative_config
    return {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "block_size": cache.block_size,
        "scheduler_block_size": getattr(core.scheduler, "block_size", None),
        "num_blocks": cache.num_gpu_blocks,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "enforce_eager": bool(model.enforce_eager),
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "speculative_method": "none" if speculative is None else str(speculative.method),
        "num_speculative_tokens": 0 if speculative is None else int(speculative.num_speculative_tokens),
        "additional_config": {key: str(value) for key, value in (config.additional_config or {}).items()},
    }


def _salt_newcomers(core: Any) -> None:
    """Hashes are made in the thread that takes requests in; a salt that came in between is put right on adding."""
    preprocess, add = core.preprocess_add_request, core.add_request

    def salted(request: Any) -> Any:
        salt = core.polymorph_salted
        if salt is not None:
            request.cache_salt = _joined(salt, request.cache_salt)
        made = preprocess(request)
        made[0].polymorph_salted = salt
        return made

    def added(request: Any, request_wave: int = 0) -> Any:
        _resalt(request, core.polymorph_salted)
        return add(request, request_wave)

    core.preprocess_add_request, core.add_request = salted, added


def _resalt(request: Any, salt: str | None) -> None:
    held = getattr(request, "polymorph_salted", None)
    if held == salt:
        return
    own = request.cache_salt
    if held is not None:
        own = own.removeprefix(_joined(held, None)).removeprefix(_SEPARATOR) or None
    request.cache_salt = own if salt is None else _joined(salt, own)
    request.polymorph_salted = salt
    request.block_hashes = []
    request.update_block_hashes()


_SEPARATOR = "\x1f"


def _joined(salt: str, own: str | None) -> str:
    return f"polymorph{_SEPARATOR}{salt}" + (f"{_SEPARATOR}{own}" if own else "")
