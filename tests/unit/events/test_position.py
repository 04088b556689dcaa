"""Positions, extents and subject patterns."""

import pytest

from polymorph.bus.pattern import matches
from polymorph.bus.position import START, Extent, Position


@pytest.mark.parametrize(
    ("after", "resumed", "gone"),
    [
        (START, Position(7, 9), False),
        (Position(7, 12), Position(7, 12), False),
        (Position(7, 9), Position(7, 9), False),
        (Position(7, 8), Position(7, 9), True),
        (Position(6, 15), Position(7, 9), True),
        (Position(7, 20), Position(7, 20), False),
        (Position(7, 21), Position(7, 20), True),
    ],
)
def test_where_a_reader_goes_on(after, resumed, gone):
    assert Extent(epoch=7, first=10, last=20).resume(after) == (resumed, gone)


def test_a_position_reads_what_it_writes():
    assert Position.parse(str(Position(1_760_000_000_000, 42))) == Position(1_760_000_000_000, 42)


@pytest.mark.parametrize(
    ("pattern", "subject", "matched"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a", "a.b", False),
    ],
)
def test_patterns_match_as_on_nats(pattern, subject, matched):
    assert matches(pattern, subject) == matched
