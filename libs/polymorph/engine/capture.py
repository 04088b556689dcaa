"""Captured calls on disk: one safetensors file a call, with its inputs, and one for weights."""

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from polymorph.engine.slots import Slots
from polymorph.kernels.definitions import definition_named


def collect(slots: Slots, directory: Path, *, weight: bool = False) -> dict[str, Any]:
    """Ends the capture and writes what it held; a refusal where the disk does not take it.

    A call's file holds its inputs by their names in the definition. With `weight`, what the first call's layer packs is
    written too, as the model had it: `weight` in the answer names that file for the layer's calls, and is None for those
    of others, or where the weights were not kept or the operation has none.
    """
    held = slots.ops.capture_finish()
    try:
        return {"ok": True, "reason": "", "calls": _written(slots, directory, *held, weight=weight)}
    except (OSError, SafetensorError) as error:  # safetensors has a class of its own for a failed write
        return {"ok": False, "reason": f"captured inputs cannot be written to {directory}: {error}"}


def _written(
    slots: Slots,
    directory: Path,
    sites: list[int],
    sizes: list[int],
    names: list[str],
    tensors: list[Any],
    *,
    weight: bool,
) -> list[dict[str, Any]]:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    calls: list[dict[str, Any]] = []
    for index, (first, last) in enumerate(pairwise(accumulate(sizes, initial=0))):
        path = directory / f"call-{index}.safetensors"
        save_file(dict(zip(names[first:last], tensors[first:last], strict=True)), str(path))
        calls.append({"path": str(path), "m": int(tensors[first].shape[0]), "site": int(sites[index])})
    # Of a large model the weights of all layers would be gigabytes, written while every stream stands still.
    weights = {sites[0]: _write_weights(slots, sites[0], directory)} if weight and calls else {}
    return [{**call, "weight": weights.get(call["site"])} for call in calls]


def _write_weights(slots: Slots, site: int, directory: Path) -> str | None:
    layer = slots.layer_of_site(site)
    if layer is None or None in layer.kept:
        return None
    names = definition_named(layer.definition).x_polymorph.packed_inputs
    path = directory / f"weight-{site}.safetensors"
    weights = {
        name: kept.restore().contiguous() for name, kept in zip(names, layer.kept, strict=True) if kept
    }
    save_file(weights, str(path))
    return str(path)
