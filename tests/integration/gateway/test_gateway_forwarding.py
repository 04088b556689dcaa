"""Bytes go through the gateway as they are, when they come, and stop when the client leaves."""

import asyncio
import json

import httpx
import openai
import pytest
from openai_upstream import CHAT, EVENTS, HUGE

pytestmark = pytest.mark.asyncio
JSON = {"content-type": "application/json"}


async def test_a_stream_passes_byte_for_byte_and_the_request_unchanged(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url])
    headers = {**JSON, "X-Request-ID": "my.id-1", "Authorization": "Bearer t", "traceparent": "00-ab-cd-01"}
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/v1/chat/completions?x=1", content=chat, headers=headers)
    assert answer.status_code == 200
    assert answer.content == b"".join(EVENTS)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-engine"] == "double"
    assert answer.headers["x-request-id"] == "my.id-1"
    seen = upstream.requests[0]
    assert seen.body == chat
    assert seen.target == "/v1/chat/completions?x=1"
    assert seen.headers["x-request-id"] == "my.id-1"
    assert seen.headers["authorization"] == "Bearer t"
    assert seen.headers["traceparent"] == "00-ab-cd-01"


async def test_an_invalid_request_id_is_replaced(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url])
    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{url}/v1/chat/completions", content=chat, headers={**JSON, "X-Request-ID": "a b" * 99}
        )
    made = answer.headers["x-request-id"]
    assert len(made) == 32
    assert upstream.requests[0].headers["x-request-id"] == made


async def test_nothing_is_buffered(services, upstream, chat):
    """The first event is here before the second exists."""
    url = await services.ready_gateway(workers=[upstream.url])
    headers = {**JSON, "x-double": "gated"}
    got = b""
    async with (
        httpx.AsyncClient(timeout=10) as client,
        client.stream("POST", f"{url}/v1/chat/completions", content=chat, headers=headers) as answer,
    ):
        stream = answer.aiter_raw()
        for count in range(1, len(EVENTS) + 1):
            expected = b"".join(EVENTS[:count])
            while len(got) < len(expected):
                got += await anext(stream)
            assert got == expected
            upstream.release.release()


@pytest.mark.parametrize("script", ["prefill", "gated"])
async def test_a_client_that_leaves_is_felt_by_the_worker(services, upstream, chat, script):
    """During prefill (nothing answered yet) and in the middle of a stream."""
    url = await services.ready_gateway(workers=[upstream.url])
    headers = {**JSON, "x-double": script}
    async with httpx.AsyncClient(timeout=10) as client:
        request = asyncio.create_task(
            client.post(f"{url}/v1/chat/completions", content=chat, headers=headers)
        )
        await asyncio.wait_for(upstream.arrived.wait(), 5)
        if script == "gated":
            upstream.release.release()
            await asyncio.sleep(0.05)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await asyncio.wait_for(upstream.requests[0].left.wait(), 2)


async def test_the_openai_client_works_streaming_and_not(services, upstream):
    url = await services.ready_gateway(workers=[upstream.url])
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).owned_by == "polymorph"
        messages = [{"role": "user", "content": "Hi"}]
        whole = await client.chat.completions.create(model="m", messages=messages)
        assert whole.choices[0].message.content == "Hello"
        assert whole.usage.total_tokens == 4
        stream = await client.chat.completions.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello wörld ✓"
        assert chunks[-1].usage.total_tokens == 5
        completion = await client.completions.create(model="m", prompt="Hi")
        assert completion.choices[0].text == "Hello"


async def test_a_huge_answer_and_a_huge_question_pass(services, upstream):
    url = await services.ready_gateway(workers=[upstream.url])
    body = json.dumps({"model": "m", "prompt": "y" * 5_000_000}).encode()
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(
            f"{url}/v1/completions", content=body, headers={**JSON, "x-double": "huge"}
        )
    assert answer.content == HUGE
    assert upstream.requests[0].body == body


async def test_a_workers_error_is_the_workers(services, upstream, chat):
    """Status and body pass unchanged, and nothing is sent again."""
    url = await services.ready_gateway(workers=[upstream.url])
    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{url}/v1/chat/completions", content=chat, headers={**JSON, "x-double": "500"}
        )
    assert answer.status_code == 500
    assert answer.json() == {"error": {"message": "engine died"}}
    assert len(upstream.requests) == 1


async def test_a_reset_before_the_first_byte_goes_to_another_worker(services, upstream, second, chat):
    url = await services.ready_gateway(workers=[upstream.url, second.url])
    await _both_known(url, upstream, second)
    upstream.requests.clear()
    second.requests.clear()
    upstream.resets_left = second.resets_left = 0
    async with httpx.AsyncClient() as client:
        for number in range(8):
            # Whoever is chosen resets once; the other one serves.
            upstream.resets_left, second.resets_left = (1, 0) if number % 2 else (0, 1)
            answer = await client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON)
            assert answer.content == b"".join(EVENTS)
    bodies = [seen.body for seen in upstream.requests + second.requests]
    assert len(bodies) > 8
    assert set(bodies) == {chat}


async def test_a_killed_worker_is_replaced_by_another(services, upstream, second, chat):
    url = await services.ready_gateway(workers=[upstream.url, second.url])
    await _both_known(url, upstream, second)
    await second.stop()
    async with httpx.AsyncClient() as client:
        for _ in range(8):
            answer = await client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON)
            assert answer.status_code == 200
            assert answer.headers["x-engine"] == "double"


async def test_without_a_router_requests_that_share_an_id_share_the_workers(services, upstream, second, chat):
    url = await services.ready_gateway(workers=[upstream.url, second.url])
    await _both_known(url, upstream, second)
    upstream.requests.clear()
    second.requests.clear()
    async with httpx.AsyncClient() as client:
        for _ in range(24):
            headers = {**JSON, "x-request-id": "same"}
            answer = await client.post(f"{url}/v1/chat/completions", content=chat, headers=headers)
            assert answer.status_code == 200
    assert upstream.requests
    assert second.requests


async def _both_known(url: str, upstream, second) -> None:
    """Both workers have answered once."""
    body = json.dumps({"model": "m", "prompt": "x"}).encode()
    async with httpx.AsyncClient() as client, asyncio.timeout(10):
        while not (upstream.requests and second.requests):
            await client.post(f"{url}/v1/completions", content=body, headers=JSON)


async def test_without_a_worker_that_answers_the_client_gets_503(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url])
    await upstream.stop()
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "service_unavailable"


async def test_a_stream_that_breaks_off_ends_with_an_error_event_and_no_done(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url])
    headers = {**JSON, "x-double": "cut"}
    got: list[bytes] = []
    with pytest.raises(httpx.RemoteProtocolError):
        await _collect(f"{url}/v1/chat/completions", chat, headers, got)
    whole = b"".join(EVENTS[:2])
    assert b"".join(got).startswith(whole)
    last = b"".join(got)[len(whole) :]
    assert last.startswith(b"data: ")
    assert last.endswith(b"\n\n")
    assert json.loads(last[6:])["error"]["code"] == "stream_interrupted"
    assert b"[DONE]" not in last
    assert len(upstream.requests) == 1


async def _collect(url: str, body: bytes, headers: dict[str, str], into: list[bytes]) -> None:
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", url, content=body, headers=headers) as answer,
    ):
        async for part in answer.aiter_raw():
            into.append(part)  # noqa: PERF401 - what came before the error is kept


async def test_the_openai_client_sees_a_broken_stream_as_an_error(services, upstream):
    url = await services.ready_gateway(workers=[upstream.url])
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            extra_headers={"x-double": "cut"},
        )
        with pytest.raises(openai.APIError, match="went away"):
            async for _ in stream:
                pass


async def test_a_body_that_breaks_off_never_looks_whole(services, upstream):
    url = await services.ready_gateway(workers=[upstream.url])
    body = json.dumps({"model": "m", "prompt": "x"}).encode()
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"{url}/v1/completions", content=body, headers={**JSON, "x-double": "short"})


@pytest.mark.parametrize("idle_s", [3.0, 0.01])
async def test_a_worker_that_freezes_before_the_first_byte_is_replaced(
    services, upstream, second, chat, idle_s
):
    """On a connection that was warm and on a fresh one."""
    url = await services.ready_gateway(
        workers=[upstream.url, second.url],
        probe_interval_s=0.1,
        probe_timeout_s=0.3,
        upstream_idle_s=idle_s,
    )
    headers = {**JSON, "x-session-id": "one"}
    async with httpx.AsyncClient(timeout=20) as client:
        first = await client.post(f"{url}/v1/chat/completions", content=chat, headers=headers)
        await asyncio.sleep(0.1)
        frozen = upstream if first.headers["x-engine"] == upstream.name else second
        frozen.frozen = True
        answer = await client.post(f"{url}/v1/chat/completions", content=chat, headers=headers)
        assert answer.content == b"".join(EVENTS)
        assert {first.headers["x-engine"], answer.headers["x-engine"]} == {"double", "second"}


async def test_a_stream_of_a_worker_that_freezes_ends_with_an_error_event(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url], probe_interval_s=0.1, probe_timeout_s=0.3)
    got = b""
    async with httpx.AsyncClient(timeout=20) as client:
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - it breaks where it is read
            async with client.stream(
                "POST", f"{url}/v1/chat/completions", content=chat, headers={**JSON, "x-double": "gated"}
            ) as answer:
                async for chunk in answer.aiter_raw():
                    got += chunk
                    upstream.frozen = True
    assert got.startswith(EVENTS[0])
    assert b"stream_interrupted" in got
    assert b"[DONE]" not in got


async def test_a_worker_that_drains_finishes_what_it_has(services, upstream, chat):
    """It refuses new connections; a long answer that says nothing yet is no sign of death."""
    url = await services.ready_gateway(workers=[upstream.url], probe_interval_s=0.1, probe_timeout_s=0.3)
    async with httpx.AsyncClient(timeout=20) as client:
        waiting = asyncio.create_task(
            client.post(f"{url}/v1/chat/completions", content=chat, headers={**JSON, "x-double": "gated"})
        )
        await asyncio.wait_for(upstream.arrived.wait(), 5)
        upstream.refuse_new()
        await until_status(client, f"{url}/readyz", 503)
        await asyncio.sleep(1.0)  # longer than a frozen worker's requests are kept
        for _ in EVENTS:
            upstream.release.release()
        assert (await waiting).content == b"".join(EVENTS)


@pytest.mark.parametrize("odd", [5, None, ["m"]])
async def test_a_worker_that_names_its_model_oddly_ends_no_probing(services, upstream, second, odd):
    upstream.model = odd
    url = await services.ready_gateway(workers=[upstream.url, second.url], probe_interval_s=0.1)
    async with httpx.AsyncClient() as client:
        assert [entry["id"] for entry in (await client.get(f"{url}/v1/models")).json()["data"]] == ["m"]
        second.healthy = False
        await until_status(client, f"{url}/readyz", 503)
        upstream.model = "late"
        await until_status(client, f"{url}/v1/models/late", 200)


async def until_status(client: httpx.AsyncClient, url: str, status: int) -> None:
    async with asyncio.timeout(15):
        while (await client.get(url)).status_code != status:
            await asyncio.sleep(0.02)


async def test_connections_are_kept_and_not_limited(services, upstream, chat):
    """150 streams at once, more than any pool of 100; one after the other they share one connection."""
    url = await services.ready_gateway(workers=[upstream.url])
    headers = {**JSON, "x-double": "gated"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=20, limits=limits) as client:
        posts = [
            asyncio.create_task(client.post(f"{url}/v1/chat/completions", content=chat, headers=headers))
            for _ in range(150)
        ]
        async with asyncio.timeout(10):
            while len(upstream.requests) < 150:
                await asyncio.sleep(0.01)
        for _ in range(150 * len(EVENTS)):
            upstream.release.release()
        assert {(await post).content for post in posts} == {b"".join(EVENTS)}
        before = upstream.connections
        body = json.dumps({"model": "m", "messages": []}).encode()
        for _ in range(10):
            answer = await client.post(f"{url}/v1/chat/completions", content=body, headers=JSON)
            assert answer.json() == CHAT
    # Probes come on connections of their own; the ten requests need none.
    assert upstream.connections - before < 5


async def test_idle_connections_are_closed_before_the_worker_would(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url], upstream_idle_s=0.3, probe_interval_s=60)
    async with httpx.AsyncClient() as client:
        await client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON)
    assert upstream._open
    async with asyncio.timeout(5):
        while upstream._open:
            await asyncio.sleep(0.02)


async def test_a_connection_that_the_worker_closed_while_idle_costs_nothing(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url], attempts=1)
    async with httpx.AsyncClient() as client:
        for count in range(1, 6):
            answer = await client.post(f"{url}/v1/chat/completions", content=chat, headers=JSON)
            assert answer.content == b"".join(EVENTS)
            assert len(upstream.requests) == count
            for writer in list(upstream._open):
                writer.transport.abort()
