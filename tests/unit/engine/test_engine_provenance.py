"""The header of the revision: in every head, once, and nothing else changed."""

from typing import Any

import pytest

from polymorph.engine.provenance import RUNNING, RevisionHeader


async def answered(middleware: Any, kind: str = "http") -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    await middleware({"type": kind}, receive, send)
    return sent


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        await send({"type": "lifespan.startup.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"1")]})
    for part in (b"one", b"two"):
        RUNNING.revision = "later"
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def _running(monkeypatch):
    monkeypatch.setattr(RUNNING, "revision", "r-1")


@pytest.mark.usefixtures("_running")
async def test_a_response_names_the_revision_that_ran_when_it_began_and_its_body_passes_part_by_part():
    sent = await answered(RevisionHeader(streaming))
    assert sent[0]["headers"] == [(b"a", b"1"), (b"x-polymorph-revision", b"r-1")]
    assert [message["body"] for message in sent[1:]] == [b"one", b"two", b""]


async def test_a_header_of_that_name_is_replaced_and_what_cannot_stand_in_a_head_is_masked():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"X-Polymorph-Revision", b"lie")]}
        )

    sent = await answered(RevisionHeader(app, lambda: "r\r\nset-cookie: x"))
    assert sent[0]["headers"] == [(b"x-polymorph-revision", b"r??set-cookie:?x")]


async def test_what_is_no_request_passes_unchanged():
    assert await answered(RevisionHeader(streaming), "lifespan") == [{"type": "lifespan.startup.complete"}]
