"""README.md names what the gateway has: every route, and every outcome that it counts."""

import re
from pathlib import Path
from typing import Any, cast, get_args

from fastapi import FastAPI

from polymorph.gateway.adapters import metrics
from polymorph.gateway.adapters.routes import add_routes
from polymorph.gateway.adapters.watching import Watching
from polymorph.gateway.domain.fleet import Fleet
from polymorph.gateway.handlers import Forward
from polymorph.gateway.journey import Outcome

README = (Path(__file__).parents[3] / "README.md").read_text()


def outcomes() -> set[str]:
    """Flat, however the alias is put together."""
    flat: set[str] = set()
    for part in get_args(Outcome):
        flat |= {part} if isinstance(part, str) else set(get_args(part))
    return flat


def test_every_route_is_named_and_no_other():
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    add_routes(app, cast("Forward", object()), Fleet(), cast("Watching", _Watching()))
    served = {route.path.replace(":path", "") for route in cast("list[Any]", app.routes)}
    named = set(re.findall(r"`(?:GET|POST) (/[^` ]*)`", README))
    assert named == served


class _Watching:
    async def serve(self) -> None:
        """A route's target: the route is looked at, and never called."""


def test_every_outcome_is_named_and_no_other():
    table = README[README.index("| outcome | |") :].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == outcomes()
    (series,) = metrics.REQUESTS.collect()
    assert all(f"{outcome} (" in series.documentation for outcome in outcomes())
