"""Other weights for the draft model of a running engine, between two steps: same shapes, same place.

`plugin.register` adds the call to vLLM's workers, for `collective_rpc`; nothing changes until it comes. What a draft
model proposes is verified by the target model, so that other weights change how fast tokens come and not which.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DRAFT_CALL = "polymorph_draft_weights"
_BASE = "vllm.v1.worker.worker_base"
_SHAPED_BY = (
    "architectures",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "tie_word_embeddings",
    "vocab_size",
)


class DraftRefused(ValueError):
    """The draft model keeps its weights."""


def install() -> None:
    """Adds the call to workers, where this process has them; more than once does no harm."""
    base = getattr(sys.modules.get(_BASE), "WorkerBase", None)
    if base is not None:
        base.polymorph_draft_weights = polymorph_draft_weights


def polymorph_draft_weights(worker: Any, path: str) -> dict[str, Any]:
    """Loads the weights of the folder `path`. Answers a checksum of what the model holds before and after.

    A refusal is an answer ({"ok": False, "reason": ...}), never an exception.
    """
    try:
        model, config = _draft(worker)
        _check_shapes(config.model, path)
        before = checksum(model)
        began = time.perf_counter()
        _reload(worker, model, config, path)
    except DraftRefused as refusal:
        return {"ok": False, "reason": str(refusal)}
    return {
        "ok": True,
        "reason": "",
        "seconds": time.perf_counter() - began,
        "before": before,
        "after": checksum(model),
    }


def checksum(model: Any) -> str:
    """Of all parameters that the model itself still holds; those that vLLM has packed away follow them."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        held = parameter.detach().float().double()
        digest.update(f"{name} {float(held.sum())} {float(held.abs().sum())}".encode())
    return digest.hexdigest()


def _draft(worker: Any) -> tuple[Any, Any]:
    drafter = getattr(getattr(worker, "model_runner", None), "drafter", None)
    model = getattr(drafter, "model", None)
    config = getattr(getattr(drafter, "speculative_config", None), "draft_model_config", None)
    if model is None or config is None:
        raise DraftRefused("this engine has no draft model")
    return model, config


def _check_shapes(held: str, wanted: str) -> None:
    now, then = _config(held), _config(wanted)
    for name in _SHAPED_BY:
        if now.get(name) != then.get(name):
            raise DraftRefused(
                f"{wanted} has {name} {then.get(name)}, the draft model that runs has {now.get(name)}: "
                "another draft model needs a new engine"
            )
    if not any(Path(wanted).glob("*.safetensors")):
        raise DraftRefused(f"{wanted} holds no weights: no *.safetensors")


def _config(folder: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DraftRefused(f"{folder} is no model folder: {error}") from error
    return document


def _reload(worker: Any, model: Any, config: Any, path: str) -> None:
    """Layer by layer, as vLLM reloads a target model: packed weights are packed anew."""
    try:
        from vllm.config import set_current_vllm_config  # noqa: PLC0415 - only a worker has vLLM
        from vllm.model_executor.model_loader.reload.inplace import reload_weights  # noqa: PLC0415
    except ImportError as error:
        raise DraftRefused(f"this vLLM reloads no weights in place: {error}") from error
    load = worker.vllm_config.load_config
    around = SimpleNamespace(model_config=config, load_config=load, lora_config=None)
    with set_current_vllm_config(worker.vllm_config):
        reload_weights(around, model, None, path, True)
