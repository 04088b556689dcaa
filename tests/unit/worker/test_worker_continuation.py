"""What becomes of a request whose engine died: every class of requests, and the arithmetic of the seam."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymorph.worker.domain.continuation import MOST_DEATHS, Continue, End, Interrupted, continuation

BEGUN_ENDS = {
    "presence_penalty": (0.1, "presence_penalty"),
    "frequency_penalty": (-0.5, "frequency_penalty"),
    "structured": (True, "grammar"),
    "other_numerics": (True, "lossy"),
    "bad_phrases": (True, "bad_words"),
    "thinking_budget": (True, "thinking_token_budget"),
    "repetition_detection": (True, "repetition_detection"),
    "watermarked": (True, "watermark"),
    "custom_processors": (True, "logits processors"),
    "scripted": (True, "trace_decode_token_ids"),
    "routed_experts": (True, "routed experts"),
    "embedded_prompt": (True, "embeddings"),
    "seeded": (True, "seed"),
}
ALWAYS_ENDS = {
    "input_stream": (True, "input is a stream"),
    "remote_cache": (True, "another engine"),
    "media": (True, "images"),
    "deaths": (MOST_DEATHS + 1, "3 times"),
}


def test_every_field_has_a_class() -> None:
    """A flag that is added must be decided on."""
    decided = {*BEGUN_ENDS, *ALWAYS_ENDS, "sent", "max_tokens", "min_tokens", "seeds_resume"}
    assert {field.name for field in dataclasses.fields(Interrupted)} == decided


@given(
    max_tokens=st.integers(1, 1000),
    sent=st.integers(0, 999),
    min_tokens=st.integers(0, 1000),
    seeded=st.booleans(),
    deaths=st.integers(1, MOST_DEATHS),
)
def test_nothing_is_sent_twice_or_left_out(
    max_tokens: int, sent: int, min_tokens: int, seeded: bool, deaths: int
) -> None:
    sent %= max_tokens
    plan = continuation(
        Interrupted(sent, max_tokens, min_tokens, deaths=deaths, seeded=seeded, seeds_resume=True)
    )
    assert isinstance(plan, Continue)
    assert plan.max_tokens is not None
    assert plan.max_tokens >= 1
    assert sent + plan.max_tokens == max_tokens
    assert plan.min_tokens == max(0, min_tokens - sent)
    assert plan.draws == (sent if seeded else 0)


@pytest.mark.parametrize(("name", "case"), BEGUN_ENDS.items())
def test_what_counts_its_output_alone_goes_on_only_from_its_beginning(
    name: str, case: tuple[Any, str]
) -> None:
    value, words = case
    fields: dict[str, Any] = {name: value}
    assert isinstance(continuation(Interrupted(0, 8, **fields)), Continue)
    plan = continuation(Interrupted(1, 8, **fields))
    assert isinstance(plan, End)
    assert words in plan.reason


@pytest.mark.parametrize(("name", "case"), ALWAYS_ENDS.items())
@pytest.mark.parametrize("sent", [0, 3])
def test_what_the_engine_alone_had_never_goes_on(name: str, case: tuple[Any, str], sent: int) -> None:
    value, words = case
    fields: dict[str, Any] = {name: value}
    plan = continuation(Interrupted(sent, 8, **fields))
    assert isinstance(plan, End)
    assert words in plan.reason


def test_a_seed_goes_on_where_the_engine_can_resume_it() -> None:
    plan = continuation(Interrupted(4, 8, seeded=True, seeds_resume=True))
    assert plan == Continue(max_tokens=4, min_tokens=0, draws=4)


def test_a_request_without_a_limit_goes_on_without_one() -> None:
    assert continuation(Interrupted(4, None)) == Continue(max_tokens=None, min_tokens=0)


def test_one_whose_last_token_was_sent_is_not_given_another() -> None:
    assert isinstance(continuation(Interrupted(8, 8)), End)
