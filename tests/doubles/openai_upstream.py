"""A double of a worker: an OpenAI server that does what its script says and remembers what it saw.

The script comes in the header `x-double`, which a gateway must pass on. It is a double since no real engine resets a
connection, or stops between two chunks, on demand.
"""

import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import Self

EVENTS = (
    (
        b'data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        b'{"role":"assistant","content":"Hel"},"finish_reason":null}]}\n\n'
    ),
    'data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    '{"content":"lo wörld ✓"},"finish_reason":null}]}\n\n'.encode(),
    (
        b'data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        b'{},"finish_reason":"stop"}]}\n\n'
    ),
    (
        b'data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":'
        b'{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
    ),
    b"data: [DONE]\n\n",
)
CHAT = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
COMPLETION = {
    "id": "c2",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "text": "Hello", "finish_reason": "stop", "logprobs": None}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
HUGE = json.dumps({"filler": "x" * (6 * 1024 * 1024)}).encode()


@dataclass
class Seen:
    """One request as it arrived; `left` is set when its client went away before the answer was whole."""

    target: str
    headers: dict[str, str]
    body: bytes
    left: asyncio.Event = field(default_factory=asyncio.Event)


class _Reader(asyncio.StreamReader):
    """Tells when the client leaves without reading ahead of its next request."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.gone.set()

    def set_exception(self, exc: BaseException) -> None:
        super().set_exception(exc)
        self.gone.set()


class OpenAIUpstream:
    """Listens on a free loopback port."""

    def __init__(self, model: str = "m", name: str = "double") -> None:
        self.model = model
        self.name = name
        self.requests: list[Seen] = []
        self.arrived = asyncio.Event()
        self.release = asyncio.Semaphore(0)
        self.healthy = True
        self.frozen = False
        self.resets_left = 0
        self.heads_only_left = 0
        self.restarting: asyncio.Event | None = None
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> str:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: asyncio.StreamReaderProtocol(_Reader(), self._serve), "127.0.0.1", port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self.url

    async def stop(self) -> None:
        """Stops listening and cuts every connection, as a killed process would."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._open):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    def refuse_new(self) -> None:
        """Stops listening and goes on with what it has, as a draining process does."""
        if self._server is not None:
            self._server.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not isinstance(reader, _Reader):
            raise TypeError(f"{reader!r} tells no leaving")
        self._open.add(writer)
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _one(self, reader: _Reader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        target = head[0].split(" ")[1]
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if self.frozen:  # as a host that stands still: connections are accepted, and nothing is answered
            await reader.gone.wait()
            return False
        if target == "/health":
            if self.restarting is not None:
                return await self._sent_back(writer)
            return await self._plain(writer, 200 if self.healthy else 503, b"", "text/plain")
        if target == "/v1/models":
            listed = {"object": "list", "data": [{"id": self.model, "object": "model"}]}
            return await self._plain(writer, 200, json.dumps(listed).encode())
        seen = Seen(target, headers, body)
        self.requests.append(seen)
        self.arrived.set()
        answer = asyncio.ensure_future(self._answer(seen, writer))
        leaving = asyncio.ensure_future(reader.gone.wait())
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            seen.left.set()
            answer.cancel()
            await asyncio.gather(answer, leaving, return_exceptions=True)
            return False
        if not leaving.done():
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        return answer.result()

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        script = self._script(seen)
        if self.restarting is not None and script != "sent-back":
            await self.restarting.wait()
        document = json.loads(seen.body)
        match script:
            case "sent-back":
                return await self._sent_back(writer)
            case "reset" | "head-only":
                return await self._left(writer, head=script == "head-only")
            case "prefill":
                await asyncio.Event().wait()
            case "400" | "500":
                return await self._plain(writer, int(script), b'{"error":{"message":"engine died"}}')
            case "huge":
                return await self._plain(writer, 200, HUGE)
            case "short":
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
                )
                await writer.drain()
                writer.close()
                return False
            case _:
                pass
        whole = json.dumps(CHAT if "chat" in seen.target else COMPLETION).encode()
        streams = document.get("stream")
        return await (self._stream(script, writer) if streams else self._plain(writer, 200, whole))

    def _script(self, seen: Seen) -> str:
        if self.restarting is not None and seen.headers.get("x-polymorph-retry") == "elsewhere":
            return "sent-back"
        if self.resets_left:
            self.resets_left -= 1
            return "reset"
        if self.heads_only_left:
            self.heads_only_left -= 1
            return "head-only"
        return seen.headers.get("x-double", "")

    async def _left(self, writer: asyncio.StreamWriter, *, head: bool) -> bool:
        if head:
            fields = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.transport.abort()
        return False

    async def _sent_back(self, writer: asyncio.StreamWriter) -> bool:
        body = b'{"error":{"message":"the engine is being restarted"}}'
        return await self._plain(writer, 503, body, extra="X-Polymorph-Retry: elsewhere\r\n")

    async def _plain(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        body: bytes,
        kind: str = "application/json",
        extra: str = "",
    ) -> bool:
        head = (
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nX-Engine: {self.name}\r\n{extra}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return True

    async def _stream(self, script: str, writer: asyncio.StreamWriter) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            + f"X-Engine: {self.name}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        )
        for number, event in enumerate(EVENTS):
            if script == "gated" and number:
                await self.release.acquire()
            if script == "cut" and number == 2:
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.transport.abort()
                return False
            if script == "slow":
                await asyncio.sleep(0.15)
            # Odd boundaries: a chunk need not hold a whole event.
            middle = len(event) // 2
            for part in (event[:middle], event[middle:]):
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _main(port: int) -> None:
    upstream = OpenAIUpstream()
    await upstream.start(port)
    print(upstream.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main(int(sys.argv[1])))
