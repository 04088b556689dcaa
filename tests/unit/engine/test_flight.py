"""The flight record: what was in flight when the engine died, or hangs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymorph.engine.flight import SIZE, Flight, FlightRecord, in_flight, path_of

A, B = "a" * 64, "b" * 64


def test_a_call_is_in_flight_between_its_begin_and_its_end(tmp_path: Path) -> None:
    with FlightRecord(tmp_path, 0) as record:
        assert in_flight(tmp_path) == ()
        record.begin(A, epoch=3, now_ns=1_000)
        assert in_flight(tmp_path) == (Flight(0, A, 1_000, 3, 1),)
        record.end()
        assert in_flight(tmp_path) == ()
        record.begin(B, epoch=4, now_ns=2_000)
        assert in_flight(tmp_path) == (Flight(0, B, 2_000, 4, 2),)
        assert in_flight(tmp_path)[0].seconds(2_500_002_000) == 2.5


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    with FlightRecord(tmp_path, 0), FlightRecord(tmp_path, 11) as other:
        other.begin(A, epoch=1, now_ns=5)
        assert [flight.rank for flight in in_flight(tmp_path)] == [11]


def test_the_layout_is_the_one_that_the_dispatcher_writes(tmp_path: Path) -> None:
    with FlightRecord(tmp_path, 2) as record:
        record.begin(A, epoch=7, now_ns=9)
        content = path_of(tmp_path, 2).read_bytes()
    expected = (9).to_bytes(8, "little") + (7).to_bytes(8, "little") + A.encode() + (1).to_bytes(8, "little")
    assert content == expected + bytes(SIZE - len(expected))


@given(st.binary(max_size=200))
def test_whatever_lies_there_is_a_call_or_none(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("flight")
    path_of(folder, 0).write_bytes(content)
    (folder / "rank-x.flight").write_bytes(content)
    for flight in in_flight(folder):
        assert flight.began_ns > 0
        assert len(flight.artifact) == 64


def test_a_folder_that_is_not_there_has_no_calls(tmp_path: Path) -> None:
    assert in_flight(tmp_path / "none") == ()


def test_a_digest_is_wanted(tmp_path: Path) -> None:
    with FlightRecord(tmp_path, 0) as record, pytest.raises(ValueError, match="no digest"):
        record.begin("kernel", 1, 1)
