"""Requests of workers that restart their engines: taken by others, else held; never sent twice after a byte."""

import asyncio

import httpx
import pytest
from openai_upstream import EVENTS

pytestmark = pytest.mark.asyncio
JSON = {"content-type": "application/json"}
WHOLE = b"".join(EVENTS)


async def _both_known(client, url, *doubles):
    """Until each double was asked something, which is then forgotten."""
    async with asyncio.timeout(10):
        while not all(double.requests for double in doubles):
            await client.post(f"{url}/v1/chat/completions", content=b'{"model":"m"}', headers=JSON)
    for double in doubles:
        double.requests.clear()


async def _metric(client, url, name):
    text = (await client.get(f"{url}/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


async def test_another_worker_takes_what_one_without_an_engine_sends_back(services, upstream, second, chat):
    url = await services.ready_gateway(workers=[upstream.url, second.url])
    async with httpx.AsyncClient(timeout=10) as client:
        await _both_known(client, url, upstream, second)
        upstream.restarting = asyncio.Event()
        for _ in range(8):
            answer = await client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON)
            assert (answer.status_code, answer.content) == (200, WHOLE)
            assert answer.headers["x-engine"] == "second"
            assert "x-polymorph-retry" not in answer.headers
        assert len(second.requests) == 8
        assert await _metric(client, url, "polymorph_gateway_held_total") == 0
        # It is no dead worker: it serves again as soon as it says so.
        upstream.restarting = None
        upstream.requests.clear()
        async with asyncio.timeout(20):
            while not upstream.requests:
                await client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON)
                await asyncio.sleep(0.05)


async def test_with_nobody_else_the_request_waits_for_the_engine(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url], probe_interval_s=0.05)
    upstream.restarting = asyncio.Event()
    async with httpx.AsyncClient(timeout=10) as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON))
        await asyncio.wait_for(upstream.arrived.wait(), 5)
        await asyncio.sleep(0.5)  # many probes: none of them may take it for dead
        assert not asking.done()
        upstream.restarting.set()
        assert (await asking).content == WHOLE
    assert len(upstream.requests) == 1


async def test_where_all_restart_one_of_them_holds_the_request(services, upstream, second, chat):
    url = await services.ready_gateway(workers=[upstream.url, second.url])
    async with httpx.AsyncClient(timeout=10) as client:
        await _both_known(client, url, upstream, second)
        upstream.restarting = second.restarting = asyncio.Event()
        asking = asyncio.create_task(client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON))
        async with asyncio.timeout(5):
            while len(upstream.requests + second.requests) < 2:
                await asyncio.sleep(0.01)
        upstream.restarting.set()
        assert (await asking).content == WHOLE
        told = [seen.headers.get("x-polymorph-retry") for seen in upstream.requests + second.requests]
        assert sorted(told, key=str) == [None, "elsewhere"]


async def test_a_worker_that_restarts_while_the_other_is_gone_is_asked_to_hold(
    services, upstream, second, chat
):
    url = await services.ready_gateway(workers=[upstream.url, second.url])
    async with httpx.AsyncClient(timeout=10) as client:
        await _both_known(client, url, upstream, second)
        upstream.restarting = asyncio.Event()
        await second.stop()
        asking = [
            asyncio.create_task(client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON))
            for _ in range(8)
        ]
        async with asyncio.timeout(10):
            while sum("x-polymorph-retry" not in seen.headers for seen in upstream.requests) < 8:
                await asyncio.sleep(0.01)
        upstream.restarting.set()
        assert [answer.content for answer in await asyncio.gather(*asking)] == [WHOLE] * 8


async def test_a_head_without_a_byte_of_a_body_is_no_answer(services, upstream, second, chat):
    url = await services.ready_gateway(workers=[upstream.url, second.url])
    async with httpx.AsyncClient(timeout=10) as client:
        await _both_known(client, url, upstream, second)
        for number in range(6):
            upstream.heads_only_left, second.heads_only_left = (1, 0) if number % 2 else (0, 1)
            answer = await client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON)
            assert answer.content == WHOLE
        assert len(upstream.requests + second.requests) > 6
        assert await _metric(client, url, "polymorph_gateway_retries_total") > 0


async def test_after_a_byte_nothing_is_sent_again(services, upstream, second, chat):
    url = await services.ready_gateway(workers=[upstream.url, second.url])
    async with httpx.AsyncClient(timeout=10) as client:
        await _both_known(client, url, upstream, second)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"{url}/v1/chat/completions", content=chat, headers={**JSON, "x-double": "cut"})
    assert len(upstream.requests + second.requests) == 1


async def test_a_client_cannot_have_its_request_sent_back(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url])
    async with httpx.AsyncClient(timeout=10) as client:
        headers = {**JSON, "X-Polymorph-Retry": "elsewhere"}
        await client.post(f"{url}/v1/chat/completions", content=chat, headers=headers)
    assert "x-polymorph-retry" not in upstream.requests[0].headers
