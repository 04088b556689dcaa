"""From the engine's request ids back to the X-Request-ID that the gateway sent."""

import re

from polymorph.engine.loading.rows import SELF_PREFIX

_PREFIX = re.compile(r"^(?:chatcmpl-|cmpl-|resp_)")
_CHOICE = re.compile(r"-\d+$")


def client_request_id(engine_id: str) -> str | None:
    """The id that the client (or the gateway for it) sent; None for a request of the worker's own.

    vLLM puts the kind of endpoint before it and, for completions, the number of the prompt behind it.
    """
    if engine_id.startswith(SELF_PREFIX):
        return None
    found = _PREFIX.sub("", engine_id)
    return _CHOICE.sub("", found) if engine_id.startswith("cmpl-") else found
