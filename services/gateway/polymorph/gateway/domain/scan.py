"""What routing needs to know of a request body, which goes on unchanged."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from polymorph.gateway.domain.refusal import bad_request

_CHARS_PER_TOKEN = 4
_PROGRAM_FIELDS = ("program_id", "prompt_cache_key", "user")


@dataclass(frozen=True, slots=True)
class Scan:
    """`prompt_tokens_estimate` is exact where the prompt came as token ids."""

    model: str
    stream: bool
    max_tokens: int | None
    program_id: str | None
    prompt_chars: int
    prompt_tokens_estimate: int


def scan(body: bytes, session: str | None = None) -> Scan:
    """Reads `body`; `session` is the header X-Session-ID.

    Raises:
        Refusal: no JSON object, or no model (400).
    """
    try:
        document = from_json(body)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise bad_request(f"the body is a JSON {type(document).__name__}: send an object")
    model = document.get("model")
    if not isinstance(model, str) or not model:
        said = "missing" if "model" not in document else "null" if model is None else repr(model)
        raise bad_request(f"model is {said}: name one of GET /v1/models", param="model")
    chars, tokens = _prompt_size(document)
    return Scan(
        model=model,
        stream=document.get("stream") is True,
        max_tokens=_max_tokens(document),
        program_id=_program(document, session),
        prompt_chars=chars,
        prompt_tokens_estimate=tokens + chars // _CHARS_PER_TOKEN,
    )


def _max_tokens(document: Mapping[str, Any]) -> int | None:
    for field in ("max_completion_tokens", "max_tokens"):
        value = document.get(field)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _program(document: Mapping[str, Any], session: str | None) -> str | None:
    """A digest of the first id that names the program: an id may be a person's name, and it leaves the gateway."""
    named = (document.get(field) for field in _PROGRAM_FIELDS)
    first, *others = (value if isinstance(value, str) else None for value in named)
    for value in (first, session, *others):
        if value:
            return f"prog-{hashlib.sha256(value.encode(errors='surrogatepass')).hexdigest()[:16]}"
    return None


def _prompt_size(document: Mapping[str, Any]) -> tuple[int, int]:
    """Characters of text and token ids."""
    messages = document.get("messages")
    if isinstance(messages, list):
        return sum(_content_chars(m.get("content")) for m in messages if isinstance(m, dict)), 0
    return _completion_prompt(document.get("prompt"))


def _content_chars(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return sum(len(text) for text in texts if isinstance(text, str))
    return 0


def _completion_prompt(prompt: Any) -> tuple[int, int]:
    if isinstance(prompt, str):
        return len(prompt), 0
    if not isinstance(prompt, list):
        return 0, 0
    if prompt and isinstance(prompt[0], int):
        return 0, len(prompt)
    sizes = [_completion_prompt(part) for part in prompt if isinstance(part, str | list)]
    return sum(chars for chars, _ in sizes), sum(tokens for _, tokens in sizes)
