"""The allow-list of routes: what is not here is not served."""

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polymorph.events.state import WorkerRecord
from polymorph.gateway.adapters.watching import Watching
from polymorph.gateway.domain.fleet import Fleet
from polymorph.gateway.domain.placing import check_model, nobody
from polymorph.gateway.domain.refusal import Refusal
from polymorph.gateway.handlers import Forward

COMPLETIONS = ("/v1/chat/completions", "/v1/completions")


def add_routes(app: FastAPI, forward: Forward, fleet: Fleet, watching: Watching) -> None:
    """Adds every route that there is."""
    for path in COMPLETIONS:
        app.router.routes.append(Route(path, forward, methods=["POST"]))
    app.add_api_route("/v1/events", watching.serve, methods=["GET"], response_model=None)
    _add_models(app, fleet)
    _add_health(app, fleet)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(HTTPException, _no_such_route)


def _add_models(app: FastAPI, fleet: Fleet) -> None:
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_model(record) for record in fleet.models()]})

    async def model(name: str) -> JSONResponse:
        served = {record.model: record for record in fleet.models()}
        if name not in served:
            check_model(fleet, name)
            raise nobody(name, ())
        return JSONResponse(_model(served[name]))

    app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"], response_model=None)


def _add_health(app: FastAPI, fleet: Fleet) -> None:
    async def healthz() -> Response:
        return Response("alive\n", media_type="text/plain")

    async def readyz() -> Response:
        if fleet.ready():
            return Response("ready\n", media_type="text/plain")
        return Response("no worker is ready\n", 503, media_type="text/plain")

    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    for path, answer in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics)):
        app.add_api_route(path, answer, methods=["GET"], response_model=None, include_in_schema=False)


def _model(record: WorkerRecord) -> dict[str, object]:
    created = int(record.started_at.timestamp())
    return {"id": record.model, "object": "model", "created": created, "owned_by": "polymorph"}


async def _refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, Refusal):
        raise error
    headers = {"retry-after": str(max(1, round(error.retry_after_s)))} if error.retry_after_s else None
    return Response(error.body(), error.status, headers, "application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path} is not served here ({error.detail})."
    headers = dict(error.headers) if error.headers else None
    return Response(
        Refusal(error.status_code, message).body(), error.status_code, headers, "application/json"
    )
