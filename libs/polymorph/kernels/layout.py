"""The packing of a weight: kernels of one packing share one packed copy."""

import hashlib

from polymorph.kernels.schema import Solution


def layout_digest(solution: Solution) -> str | None:
    """Names the packing of a solution's weight: equal digests share one packed weight. None: it packs nothing.

    Raises:
        ValueError: the solution names a layout source that it does not hold.
    """
    path = solution.x_polymorph.layout_source
    if path is None:
        return None
    for source in solution.sources:
        if source.path == path:
            content = f"{solution.definition}\n{solution.spec.binding}\n{source.content}"
            return hashlib.sha256(content.encode()).hexdigest()
    raise ValueError(f"solution {solution.name} names layout source {path!r}, which is not among its sources")
