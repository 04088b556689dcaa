"""The gateway's own errors, in the shape of OpenAI's."""

import json
from collections.abc import Collection


class Refusal(Exception):
    """An answer that is an error of ours, never of a worker."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """One line of JSON, so that it also fits into an SSE event."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def bad_request(message: str, *, param: str | None = None) -> Refusal:
    return Refusal(400, message, param=param)


def unknown_model(model: str, known: Collection[str]) -> Refusal:
    names = ", ".join(sorted(known))
    message = f"The model {model!r} does not exist here; these do: {names}."
    return Refusal(404, message, param="model", code="model_not_found")


def too_large(limit: int) -> Refusal:
    return Refusal(413, f"The body is larger than {limit:,} bytes.", code="request_too_large")


def unavailable(message: str, retry_after_s: float = 1.0) -> Refusal:
    return Refusal(
        503, message, kind="service_unavailable", code="service_unavailable", retry_after_s=retry_after_s
    )


def cut_off(message: str) -> Refusal:
    """The error event that ends a stream that began well."""
    return Refusal(502, message, kind="upstream_error", code="stream_interrupted")
