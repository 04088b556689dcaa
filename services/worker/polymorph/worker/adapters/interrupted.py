"""A request between two engines: what vLLM's front keeps of it, read and made into the rest of the request."""

from collections.abc import Iterable
from copy import copy
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.metrics.stats import RequestStateStats

from polymorph.engine.resume import DRAWS
from polymorph.worker.domain.continuation import Continue, Interrupted

_REQUEST = "_polymorph_request"
_DEATHS = "_polymorph_deaths"


def remember(state: RequestState | None, request: EngineCoreRequest) -> None:
    """Keeps the request as the first engine got it; a request that is added to goes on under its first."""
    if state is not None and not hasattr(state, _REQUEST):
        setattr(state, _REQUEST, request)


def died_again(state: RequestState) -> None:
    setattr(state, _DEATHS, _deaths(state) + 1)


def _deaths(state: RequestState) -> int:
    return getattr(state, _DEATHS, 0)


def parent_id(state: RequestState) -> str | None:
    return None if state.parent_req is None else state.parent_req.request_id


def families(states: Iterable[RequestState]) -> list[list[RequestState]]:
    """States by the queue that they share: the sequences of a request with n > 1 have one."""
    found: dict[int, list[RequestState]] = {}
    for state in states:
        found.setdefault(id(state.queue), []).append(state)
    return list(found.values())


def forget_draws(request: EngineCoreRequest) -> None:
    """The key is ours: a client may not have draws made for it."""
    sampling = request.sampling_params
    if sampling is not None and sampling.extra_args and DRAWS in sampling.extra_args:
        sampling.extra_args = {key: value for key, value in sampling.extra_args.items() if key != DRAWS}


def interrupted(state: RequestState, model_config: Any, seeds_resume: bool) -> Interrupted:
    """What decides whether it can go on."""
    request: EngineCoreRequest = getattr(state, _REQUEST)
    sampling = request.sampling_params
    common: dict[str, Any] = {
        "deaths": _deaths(state) + 1,
        "media": bool(request.mm_features),
        "input_stream": bool(request.resumable or state.streaming_input),
    }
    if sampling is None:
        return Interrupted(sent=0, max_tokens=None, **common)
    extra = sampling.extra_args or {}
    return Interrupted(
        sent=state.detokenizer.num_output_tokens(),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        seeded=sampling.sampling_type.name == "RANDOM_SEED",
        seeds_resume=seeds_resume,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        structured=sampling.structured_outputs is not None,
        bad_phrases=any(len(word) > 1 for word in sampling.bad_words_token_ids or ()),
        thinking_budget=sampling.thinking_token_budget is not None,
        repetition_detection=sampling.repetition_detection is not None,
        watermarked=bool(sampling.watermarking),
        custom_processors=bool(model_config.logits_processors),
        scripted=sampling.trace_decode_token_ids is not None,
        routed_experts=bool(state.routed_experts_chunks),
        remote_cache="kv_transfer_params" in extra or "ec_transfer_params" in extra,
        embedded_prompt=request.prompt_embeds is not None,
        **common,
    )


def rest(state: RequestState, plan: Continue) -> EngineCoreRequest:
    """What the successor's engine gets: the same id, the tokens that are there behind the prompt, the limits less."""
    original: EngineCoreRequest = getattr(state, _REQUEST)
    request = copy(original)
    sampling = original.sampling_params
    if sampling is None or not state.detokenizer.num_output_tokens():
        return request
    request.prompt_token_ids = [*original.prompt_token_ids, *state.detokenizer.output_token_ids]
    left = copy(sampling)
    left.max_tokens, left.min_tokens = plan.max_tokens, plan.min_tokens
    # What was asked of the prompt came with the first token.
    left.prompt_logprobs = None
    left.prompt_logprob_token_ids = None
    if plan.draws:
        left.extra_args = {**(sampling.extra_args or {}), DRAWS: plan.draws}
    request.sampling_params = left
    return request


class _Begun(RequestStateStats):  # type: ignore[misc]
    """Times of a request that was queued before."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "queued_ts" or not self.queued_ts:
            super().__setattr__(name, value)


def keep_first_times(state: RequestState) -> None:
    """It waited once: to be queued again is no beginning."""
    if state.stats is not None:
        state.stats.__class__ = _Begun
