"""Closing a bus whose client cannot close in order."""

import pytest

from polymorph.bus.nats import NatsBus
from polymorph.bus.server import NatsServer
from polymorph.config.clock import SystemClock


@pytest.mark.real
async def test_closing_never_raises(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under uvloop the client was seen to write to a transport that the server had closed, while it closed itself."""
    bus = await NatsBus.connect(nats_server.settings("compiler"), "/polymorph/test", SystemClock())
    close = bus.connection.client.close

    async def broken() -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    monkeypatch.setattr(bus.connection.client, "close", broken)
    try:
        await bus.close()
    finally:
        await close()
