"""Captured calls on disk: one safetensors file a call, with its inputs, and one for each weight."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from polymorph.engine.slots import Slots


def collect(slots: Slots, directory: Path) -> dict[str, Any]:
    """Writes what was captured since `capture_start`.

    A call's file holds `x` (norms: also `residual` and `weight`); `weight` in the answer names the file that holds a
    linear layer's weight, as the model had it, None where it was not kept.
    """
    sites, tensors = slots.ops.capture_finish()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    each = len(tensors) // len(sites) if sites else 0
    calls: list[dict[str, Any]] = []
    for index, site in enumerate(sites):
        path = directory / f"call-{index}.safetensors"
        names = _names(each)
        save_file(dict(zip(names, tensors[index * each : (index + 1) * each], strict=True)), str(path))
        calls.append({"path": str(path), "m": int(tensors[index * each].shape[0]), "site": int(site)})
    weights = {int(site): _write_weight(slots, int(site), directory) for site in set(sites)}
    return {"ok": True, "calls": [{**call, "weight": weights[call["site"]]} for call in calls]}


def _names(inputs: int) -> tuple[str, ...]:
    return {1: ("x",), 2: ("x", "weight"), 3: ("x", "residual", "weight")}.get(inputs, ())


def _write_weight(slots: Slots, site: int, directory: Path) -> str | None:
    layer = slots.layer_of_site(site)
    if layer is None or layer.kept is None:
        return None
    path = directory / f"weight-{site}.safetensors"
    save_file({"weight": layer.kept.restore().contiguous()}, str(path))
    return str(path)
