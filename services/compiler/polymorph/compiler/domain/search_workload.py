"""The workload that a search's candidates are judged on: the window's own shapes and weights."""

from collections.abc import Mapping

from polymorph.compiler.domain.search_target import Target
from polymorph.events.types import TrafficShapeObserved
from polymorph.events.values import TrafficShape
from polymorph.kernels.schema import Workload, WorkloadExtension


def workload(search_id: str, target: Target, window: TrafficShapeObserved) -> Workload:
    """A Workload whose `x_polymorph` also holds `m_weights` (bucket -> share of the range's step time, summing to 1)
    and `replay` (concurrency, rates and length quantiles for the end-to-end gate).
    """
    told = {operation.definition: operation for operation in window.operations}
    operation = told.get(target.definition)
    by_m = (operation and operation.by_m) or window.shape.tokens_per_step
    weights = m_weights(by_m, target.min_m, target.max_m)
    heaviest = max(weights, key=lambda name: (weights[name], -int(name)))
    extension = WorkloadExtension.model_validate(
        {
            "weight": target.share,
            "signature": f"M={target.min_m}..{target.max_m}",
            "captured_at": window.window_start.isoformat(),
            "privacy": "own-engine",
            "expert_histogram": operation.experts if operation else (),
            "m_weights": weights,
            "replay": _replay(window.shape),
        }
    )
    return Workload(uuid=search_id, axes={"M": int(heaviest)}, inputs={}, x_polymorph=extension)


def m_weights(by_m: Mapping[str, float], min_m: int, max_m: int) -> dict[str, float]:
    """The share of time by bucket within a range of M, summing to 1; the upper bucket where nothing is known."""
    inside = {name: weight for name, weight in by_m.items() if min_m <= int(name) <= max_m and weight > 0}
    total = sum(inside.values())
    if not total:
        return {str(max_m): 1.0}
    return {
        name: round(weight / total, 6) for name, weight in sorted(inside.items(), key=lambda i: int(i[0]))
    }


def _replay(shape: TrafficShape) -> dict[str, object]:
    return {
        "concurrency": shape.concurrency,
        "arrival_rate": shape.arrival_rate,
        "burstiness": shape.burstiness,
        "prompt_tokens": shape.prompt_tokens.model_dump(),
        "output_tokens": shape.output_tokens.model_dump(),
        "prefix_hit_rate": shape.prefix_hit_rate,
        "domains": shape.domains,
    }
