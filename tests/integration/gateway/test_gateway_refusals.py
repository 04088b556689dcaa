"""What the gateway refuses by itself, in the shape of OpenAI's errors."""

import asyncio
import re
import signal

import httpx
import openai
import pytest
from openai_upstream import EVENTS

pytestmark = pytest.mark.asyncio
JSON = {"content-type": "application/json"}


async def test_refusals(services, upstream):
    """One gateway, every refusal: each names what would have been right."""
    url = await services.ready_gateway(workers=[upstream.url], max_body_bytes=1000)
    async with httpx.AsyncClient(base_url=url) as client:
        await _unknown_model(client)
        await _bad_bodies(client)
        await _too_large(client)
        await _other_routes(client)
    assert upstream.requests == []


async def _unknown_model(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json={"model": "nope", "messages": []})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert error["message"] == "The model 'nope' does not exist here; these do: m."
    listed = await client.get("/v1/models/nope")
    assert (listed.status_code, listed.json()["error"]["message"]) == (404, error["message"])


async def _bad_bodies(client: httpx.AsyncClient) -> None:
    for body, said in (
        (b"{", "not JSON"),
        (b"[1]", "send an object"),
        (b"{}", "model is missing: name one of GET /v1/models"),
        (b'{"model":null}', "model is null"),
        (b'{"model":7}', "model is 7"),
        (b"", "not JSON"),
        (b'{"model":"\xff"}', "not JSON"),
    ):
        answer = await client.post("/v1/completions", content=body, headers=JSON)
        assert answer.status_code == 400, body
        assert said in answer.json()["error"]["message"]
        assert answer.headers["x-request-id"]


async def _too_large(client: httpx.AsyncClient) -> None:
    async def parts():
        for _ in range(20):
            yield b"x" * 100

    for content in (b"x" * 1001, parts()):
        answer = await client.post("/v1/completions", content=content, headers=JSON)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"


async def _other_routes(client: httpx.AsyncClient) -> None:
    for method, path, status in (
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/events?subjects=polymorph.cmd.>", 400),
        ("GET", "/v1/events?since=yesterday", 400),
        ("GET", "/v1/events?since=abc-5", 400),
        ("GET", f"/v1/events?since=0-{2**63}", 400),
        ("GET", "/v1/events", 503),
    ):
        answer = await client.request(method, path)
        assert answer.status_code == status, path
        assert answer.json()["error"]["message"]


async def test_a_bad_position_is_named_after_what_carried_it(services):
    gateway, url = services.gateway()
    await gateway.start()
    async with httpx.AsyncClient(base_url=url) as client:
        by_header = await client.get("/v1/events?since=0-0", headers={"Last-Event-ID": "seven"})
        by_query = await client.get("/v1/events?since=seven")
    for answer, name in ((by_header, "Last-Event-ID"), (by_query, "since")):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == name
        assert error["message"].startswith(f"{name} is 'seven': use <epoch>-<sequence>")


async def test_without_workers_it_lives_but_is_not_ready(services, chat):
    gateway, url = services.gateway()
    await gateway.start()
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
        answer = await client.post("/v1/chat/completions", content=chat, headers=JSON)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "No worker has registered yet" in answer.json()["error"]["message"]
        asked = await client.get("/v1/models/m")
        assert (asked.status_code, asked.headers["retry-after"]) == (503, "1")


async def test_the_openai_client_understands_the_refusal(services, upstream):
    url = await services.ready_gateway(workers=[upstream.url])
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="these do: m"):
            await client.chat.completions.create(model="other", messages=[])


async def test_metrics_count_what_happened(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url])
    async with httpx.AsyncClient(base_url=url) as client:
        await client.post("/v1/chat/completions", content=chat, headers=JSON)
        text = (await client.get("/metrics")).text
    assert 'outcome="ok"' in text
    assert 'polymorph_gateway_placements_total{by="gateway"} 1.0' in text
    assert "polymorph_gateway_requests_in_flight 0.0" in text


async def test_what_clients_did_wrong_is_not_counted_as_ok(services, upstream, chat):
    url = await services.ready_gateway(workers=[upstream.url])
    async with httpx.AsyncClient(base_url=url) as client:
        await client.post("/v1/completions", content=b"{}", headers=JSON)
        await client.post("/v1/completions", json={"model": "nope"})
        for script in ("400", "500"):
            await client.post("/v1/chat/completions", content=chat, headers={**JSON, "x-double": script})
        text = (await client.get("/metrics")).text
    for status, outcome in (
        ("400", "refused"),
        ("404", "refused"),
        ("400", "client_error"),
        ("500", "error"),
    ):
        assert re.search(
            rf'^polymorph_gateway_requests_total{{outcome="{outcome}",pool="[^"]+",status="{status}"}} 1.0$',
            text,
            re.MULTILINE,
        ), (status, outcome)
    assert 'outcome="ok"' not in text


async def test_sigterm_lets_requests_in_flight_finish(services, upstream, chat):
    gateway, url = services.gateway(workers=[upstream.url], drain_timeout_s=10)
    await gateway.start()
    async with httpx.AsyncClient(timeout=20) as client:
        async with asyncio.timeout(10):
            while (await client.get(f"{url}/readyz")).status_code != 200:
                await asyncio.sleep(0.02)
        post = asyncio.create_task(
            client.post(f"{url}/v1/chat/completions", content=chat, headers={**JSON, "x-double": "gated"})
        )
        await asyncio.wait_for(upstream.arrived.wait(), 5)
        ending = asyncio.create_task(gateway.signal(signal.SIGTERM))
        await asyncio.sleep(0.3)
        assert not ending.done()
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient() as late:
                await late.get(f"{url}/healthz")
        for _ in EVENTS:
            upstream.release.release()
        assert (await post).content == b"".join(EVENTS)
        assert await asyncio.wait_for(ending, 10) == 0


async def test_a_wrong_setting_is_one_clear_line_and_exit_code_2(services):
    gateway, _ = services.gateway(upstream_idle_s=7)
    with pytest.raises(RuntimeError, match="upstream_idle_s"):
        await gateway.start()
    assert gateway.process.returncode == 2
