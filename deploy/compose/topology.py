"""Makes the streams, buckets and the object store what they should be; waits for NATS. Idempotent."""

import asyncio
import json
import os
import sys
from pathlib import Path

from polymorph.bus.errors import BusError
from polymorph.bus.provision import provision
from polymorph.config.settings import NatsSettings

MONITOR_URL = "http://127.0.0.1:8222"
"""NATS's own loopback: this container shares its network."""


async def _provision(settings: NatsSettings) -> int:
    try:
        made = await provision(settings, monitor_url=MONITOR_URL, wait_s=60.0)
    except BusError as error:
        print(f"topology: {error}", file=sys.stderr)
        return 1
    print("\n".join(made.changes) or "the topology is as it should be")
    return 0


def main() -> int:
    path = Path(os.environ.get("POLYMORPH_CONFIG", "polymorph.yaml"))
    settings = NatsSettings.model_validate(json.loads(path.read_text())["common"]["nats"])
    return asyncio.run(_provision(settings))


if __name__ == "__main__":
    sys.exit(main())
