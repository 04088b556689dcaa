"""Which revision a worker shall run, from the desired state of its pool."""

import hashlib

from polymorph.events.state import EMPTY, DesiredState, Stage
from polymorph.events.values import Revision


def target(desired: DesiredState | None, worker_id: str) -> Revision:
    """The candidate where this worker is among those that try it, else the stable revision."""
    if desired is None:
        return EMPTY
    if desired.candidate is None or desired.stage not in {Stage.CANARY, Stage.FULL}:
        return desired.stable
    share = 1.0 if desired.stage is Stage.FULL else desired.share
    tries = standing(worker_id, desired.promotion_id or "") < share
    return desired.candidate if tries else desired.stable


def standing(worker_id: str, promotion_id: str) -> float:
    """A worker's place in [0, 1) among those of its pool: the same in a promotion, another in the next."""
    digest = hashlib.sha256(f"{promotion_id}\n{worker_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
