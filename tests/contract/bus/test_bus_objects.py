"""The object store: one behaviour on every bus."""

import asyncio
import hashlib
import random

import pytest

from polymorph.bus import topology
from polymorph.bus.errors import Corrupt, NotFound, TooLarge

BIG = random.Random(7).randbytes(3_500_000)


@pytest.mark.parametrize("data", [b"", b"x", BIG], ids=["empty", "one byte", "many chunks"])
async def test_bytes_come_back_under_their_digest(world, data):
    bus, other = await world.bus("/a"), await world.bus("/b")
    digest = await bus.put_object(data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert await other.get_object(digest) == data
    assert await other.put_object(data) == digest
    assert await bus.get_object(digest) == data


async def test_two_may_put_the_same_at_once(world):
    buses = [await world.bus(f"/{n}") for n in range(4)]
    digests = await asyncio.gather(*(bus.put_object(b"same" * 100_000) for bus in buses))
    assert len(set(digests)) == 1
    assert await buses[0].get_object(digests[0]) == b"same" * 100_000


async def test_what_is_larger_than_its_reader_takes_is_told_by_its_size(world):
    bus = await world.bus()
    digest = await bus.put_object(BIG)
    with pytest.raises(TooLarge, match="3500000 bytes, 3499999 are taken"):
        await bus.get_object(digest, at_most=3_499_999)
    assert await bus.get_object(digest, at_most=3_500_000) == BIG


async def test_an_unknown_digest_is_not_found(world):
    bus = await world.bus()
    with pytest.raises(NotFound):
        await bus.get_object("0" * 64)


@pytest.mark.parametrize("name", ["", "abc", "A" * 64, "../" + "0" * 61])
async def test_what_is_no_digest_is_refused(world, name):
    bus = await world.bus()
    with pytest.raises(ValueError, match="sha256"):
        await bus.get_object(name)


async def test_other_bytes_are_never_handed_out(world):
    bus = await world.bus()
    digest = await bus.put_object(b"kernel")
    await world.corrupt(digest)
    with pytest.raises(Corrupt):
        await bus.get_object(digest)
    assert await bus.put_object(b"kernel") == digest
    assert await bus.get_object(digest) == b"kernel"


async def test_stores_are_apart(world):
    bus = await world.bus()
    digest = await bus.put_object(b"activations", store=topology.CAPTURES)
    assert await bus.get_object(digest, store=topology.CAPTURES) == b"activations"
    with pytest.raises(NotFound):
        await bus.get_object(digest)
