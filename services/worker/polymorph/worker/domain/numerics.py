"""What a change of kernels does to outputs, and so when it may come: see docs/architecture.md, "Numerics"."""

import hashlib

from polymorph.events.state import Reordered
from polymorph.events.values import KernelBinding, Numerics, Revision


def identity(revision: Revision) -> str | None:
    """Names the numerics of a revision where they are not the model's own: prefix cache is not shared across it.

    Kernels that only reorder sums keep the precision, and so the cache; None where no kernel is lossy.
    """
    lossy = sorted(_key(kernel) for kernel in revision.kernels if kernel.numerics is Numerics.LOSSY)
    return hashlib.sha256("\n".join(lossy).encode()).hexdigest()[:16] if lossy else None


def waits_for(now: Revision, goal: Revision, reordered: Reordered) -> str | None:
    """Why a change may only come while no request runs that began before it; None where it may come at once."""
    changed = {_key(kernel): kernel for kernel in (*now.kernels, *goal.kernels)}
    same = {_key(kernel) for kernel in now.kernels} & {_key(kernel) for kernel in goal.kernels}
    classes = {kernel.numerics for key, kernel in changed.items() if key not in same}
    if Numerics.LOSSY in classes:
        return "a lossy kernel never meets a request that began before it"
    if Numerics.REORDERED in classes and reordered is Reordered.NEW_REQUESTS:
        return "this pool lets reordered kernels serve new requests alone"
    return None


def _key(kernel: KernelBinding) -> str:
    return f"{kernel.artifact} {kernel.definition} {kernel.min_m} {kernel.max_m} {kernel.numerics}"
