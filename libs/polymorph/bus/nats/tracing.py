"""The trace context in message headers (W3C traceparent)."""

import contextlib
from collections.abc import Iterator, Mapping

from opentelemetry import context, propagate


def traced(headers: dict[str, str]) -> dict[str, str]:
    """Adds `traceparent` to `headers` where a span is active."""
    propagate.inject(headers)
    return headers


@contextlib.contextmanager
def continued(headers: Mapping[str, str] | None) -> Iterator[None]:
    """Runs the block inside the sender's trace."""
    token = context.attach(propagate.extract(dict(headers or {})))
    try:
        yield
    finally:
        context.detach(token)
