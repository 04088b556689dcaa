"""What goes to a worker and comes back: heads are rewritten hop by hop, bodies never."""

from polymorph.events.headers import ELSEWHERE, RETRY
from polymorph.gateway.adapters.connection import Head
from polymorph.gateway.adapters.inbound import Headers, Scope
from polymorph.gateway.adapters.upstream import Origin

_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_OURS = _HOP | {b"host", b"content-length", b"expect", b"x-request-id", RETRY}


def request_head(scope: Scope, where: Origin, request_id: str, length: int, *, others: bool = False) -> bytes:
    """The head of the request to a worker: the client's headers, with host, length and id of ours.

    `others` says that another worker can take it, should this one have no engine.
    """
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    target = where.prefix.encode() + path + (b"?" + query if query else b"")
    lines = [
        b"POST " + target + b" HTTP/1.1",
        b"host: " + where.authority,
        b"content-length: " + str(length).encode(),
        b"x-request-id: " + request_id.encode(),
    ]
    if others:
        lines.append(RETRY + b": " + ELSEWHERE)
    dropped = _OURS | _named_by_connection(scope["headers"])
    lines += [name + b": " + value for name, value in scope["headers"] if name not in dropped]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def response_headers(head: Head, request_id: str) -> Headers:
    """The worker's headers for the client; the request's id is added where the worker did not repeat it."""
    headers = [(name.lower(), value) for name, value in head.headers]
    dropped = _HOP | {RETRY} | _named_by_connection(headers)
    kept = [(name, value) for name, value in headers if name not in dropped]
    if not any(name == b"x-request-id" for name, _ in kept):
        kept.append((b"x-request-id", request_id.encode()))
    return kept


def sends_elsewhere(head: Head) -> bool:
    """Whether the worker lives and has no engine at this moment."""
    return head.status == 503 and any(
        name.lower() == RETRY and value.lower() == ELSEWHERE for name, value in head.headers
    )


def is_event_stream(head: Head) -> bool:
    """Whether the body is server-sent events in the clear, so that an error can be told as one more event."""
    headers = {name.lower(): value.lower() for name, value in head.headers}
    return (
        headers.get(b"content-type", b"").startswith(b"text/event-stream")
        and b"content-encoding" not in headers
    )


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    named = [value for name, value in headers if name == b"connection"]
    return frozenset(part.strip().lower() for value in named for part in value.split(b","))
