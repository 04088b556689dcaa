"""From bytes to messages: what is understood, and what the refusal of the rest says."""

import datetime as dt
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymorph.events import registry
from polymorph.events.envelope import Envelope, message_id, wrap
from polymorph.events.subjects import is_token, token
from polymorph.events.types import MESSAGES, StepsCounted, WorkerRefused

WHEN = dt.datetime(2026, 11, 1, tzinfo=dt.UTC)
REFUSED = WorkerRefused(pool="p", worker_id="w", generation=1, revision="r", reason="no such kernel")


def test_type_names_are_unique():
    assert len({cls.type_name() for cls in MESSAGES}) == len(MESSAGES)


def test_an_envelope_gives_its_message_back():
    envelope = wrap(REFUSED, source="/x", time=WHEN)
    assert registry.message_of(registry.open_envelope(envelope.model_dump_json().encode())) == REFUSED


def test_an_id_names_content_and_source():
    later = wrap(REFUSED, source="/x", time=WHEN + dt.timedelta(days=1))
    assert later.id == message_id(REFUSED, "/x")
    assert message_id(REFUSED, "/y") != later.id
    assert message_id(REFUSED.model_copy(update={"generation": 2}), "/x") != later.id


def test_an_unknown_type_is_named():
    with pytest.raises(registry.Undecodable, match=r"polymorph\.evt\.worker\.sang\.v1"):
        registry.message_type("polymorph.evt.worker.sang.v1")


def test_data_that_does_not_fit_names_the_field():
    envelope = Envelope(
        id="1", source="/x", type=WorkerRefused.type_name(), subject="p", time=WHEN, data={"pool": "p"}
    )
    with pytest.raises(registry.Undecodable, match="worker_id"):
        registry.message_of(envelope)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(body):
    for read in (registry.open_envelope, registry.unpack_telemetry):
        with pytest.raises(registry.Undecodable):
            read(body)


@given(st.text(), st.text())
def test_tokens_are_safe_and_distinct(one, other):
    assert is_token(token(one))
    assert (token(one) == token(other)) == (one == other)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_s": float("nan")},
        {"step_s_by_m": {"8+": 1.0}},
        {"operations": [{"definition": "gemm", "share": 0.5, "by_m": {"8+": 0.5}}]},
        {"operations": [{"definition": "gemm", "share": float("inf")}]},
    ],
)
def test_numbers_that_no_window_could_hold_are_refused_where_they_are_read(wrong):
    """One worker's bad report must not stop the windows of its pool."""
    good = StepsCounted(
        pool="p", worker_id="w", at=WHEN, interval_s=1, steps=2, step_s=0.5, tokens=2, output_tokens=2,
        running=1, waiting=0, kv_used=0.1,
    )  # fmt: skip
    told = json.loads(registry.pack_telemetry(good))
    assert registry.unpack_telemetry(json.dumps(told).encode()) == good
    told["data"] |= wrong
    with pytest.raises(registry.Undecodable):
        registry.unpack_telemetry(json.dumps(told).encode())
