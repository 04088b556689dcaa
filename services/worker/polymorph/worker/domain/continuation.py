"""Whether a request whose engine died can go on in another, as if nothing had happened; and if not, why."""

from dataclasses import dataclass

MOST_DEATHS = 2
"""A request under which engines die again and again may be the cause, and is not given another."""


@dataclass(frozen=True)
class Interrupted:
    """One output sequence of a request when its engine died. `sent` tokens went, or will go, to the client.

    The successor is given the sent tokens as part of the prompt. What is computed from the output alone comes out
    otherwise then: those are the flags and the penalties here.
    """

    sent: int
    max_tokens: int | None
    min_tokens: int = 0
    deaths: int = 1
    seeded: bool = False
    seeds_resume: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    other_numerics: bool = False
    structured: bool = False
    bad_phrases: bool = False
    thinking_budget: bool = False
    repetition_detection: bool = False
    watermarked: bool = False
    custom_processors: bool = False
    scripted: bool = False
    routed_experts: bool = False
    input_stream: bool = False
    remote_cache: bool = False
    media: bool = False
    embedded_prompt: bool = False


@dataclass(frozen=True)
class Continue:
    """Goes on. `draws` is what a generator of the request's own has to leave out."""

    max_tokens: int | None
    min_tokens: int
    draws: int = 0


@dataclass(frozen=True)
class End:
    """Ends with an error; `reason` completes "this request cannot go on, for ..."."""

    reason: str


def continuation(request: Interrupted) -> Continue | End:
    """What becomes of an interrupted request. Nothing sent: it is sent again as it was, where the engine can read it."""
    reason = _always(request) or (_once_begun(request) if request.sent else None)
    if reason is not None:
        return End(reason)
    if request.max_tokens is not None and request.sent >= request.max_tokens:
        return End(f"all {request.max_tokens} tokens were sent and its end was not")
    return Continue(
        max_tokens=None if request.max_tokens is None else request.max_tokens - request.sent,
        min_tokens=max(0, request.min_tokens - request.sent),
        draws=request.sent if request.seeded else 0,
    )


def _always(request: Interrupted) -> str | None:
    if request.deaths > MOST_DEATHS:
        return f"engines died under it {request.deaths} times"
    if request.input_stream:
        return "its input is a stream, of which the engine had a part"
    if request.remote_cache:
        return "its prompt was computed by another engine"
    if request.media:
        return "images and sounds are sent to an engine once"
    return None


def _once_begun(request: Interrupted) -> str | None:
    """Reasons that count only where tokens were sent."""
    if request.seeded and not request.seeds_resume:
        return "this engine cannot bring its seed to where it was"
    if request.presence_penalty or request.frequency_penalty:
        return "presence_penalty and frequency_penalty count its output alone"
    for holds, reason in (
        (request.other_numerics, "a lossy kernel had computed it, or would go on with it"),
        (request.structured, "its output follows a grammar, which began with its first token"),
        (request.bad_phrases, "bad_words of several tokens are found in its output alone"),
        (request.thinking_budget, "thinking_token_budget counts its output alone"),
        (request.repetition_detection, "repetition_detection looks at its output alone"),
        (request.watermarked, "its watermark began with its first token"),
        (request.custom_processors, "this engine has logits processors of its own"),
        (request.scripted, "trace_decode_token_ids began with its first token"),
        (request.routed_experts, "routed experts are reported once"),
        (request.embedded_prompt, "its prompt is embeddings, to which tokens cannot be added"),
    ):
        if holds:
            return reason
    return None
