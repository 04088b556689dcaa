"""What the gateway decides about a placement by itself."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from polymorph.events.requests import Placed, Unplaceable
from polymorph.gateway.domain.fleet import Fleet
from polymorph.gateway.domain.refusal import Refusal, unavailable, unknown_model
from polymorph.gateway.domain.rendezvous import rendezvous
from polymorph.gateway.domain.scan import Scan


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and who said so."""

    worker_id: str
    url: str
    by: Literal["router", "gateway"]


def check_model(fleet: Fleet, model: str) -> None:
    """Raises `Refusal`: no worker is for `model` (404), or none has told yet what it is for (503)."""
    if fleet.knows(model):
        return
    known = fleet.names()
    if not known:
        raise unavailable(
            "No worker has registered yet, so it is not known which models there will be: try again in a moment."
        )
    raise unknown_model(model, known)


def choose(
    fleet: Fleet,
    scan: Scan,
    placement_id: str,
    exclude: Collection[str],
    answer: Placed | Unplaceable | None,
) -> Choice:
    """The router's word where it has one, else our own.

    A router that turned the request away since all are full is obeyed; one that knows no worker is not, if we do.
    Ours is by program, else by placement: a request id is the client's, and parallel requests may share one.

    Raises:
        Refusal: nobody can take it (503).
    """
    if isinstance(answer, Placed):
        return Choice(answer.worker_id, answer.url, "router")
    if answer is not None and answer.cause == "full":
        raise unavailable(f"{scan.model} is busy: {answer.reason}.", answer.retry_after_s)
    worker = rendezvous(scan.program_id or placement_id, fleet.live(scan.model, exclude))
    if worker is None:
        raise nobody(scan.model, exclude)
    return Choice(worker.worker_id, worker.url, "gateway")


def nobody(model: str, tried: Collection[str]) -> Refusal:
    """No worker is left to try."""
    if tried:
        return unavailable(f"No worker of {model} could be reached (tried {', '.join(sorted(tried))}).")
    return unavailable(f"{model} has no worker that is ready.")
