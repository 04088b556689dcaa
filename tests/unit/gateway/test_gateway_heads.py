"""What a client sees of a worker's head."""

from polymorph.gateway.adapters.connection import Head
from polymorph.gateway.adapters.forwarding import response_headers


def test_the_revision_that_answered_is_passed_on() -> None:
    head = Head(200, [(b"Connection", b"close"), (b"X-Polymorph-Revision", b"r-12ab")])
    assert response_headers(head, "id") == [(b"x-polymorph-revision", b"r-12ab"), (b"x-request-id", b"id")]
