"""Makes the streams, buckets and the object store what they should be; waits for NATS. Idempotent."""

import asyncio
import json
import os
import sys
from pathlib import Path

from polymorph.bus.errors import BusError
from polymorph.bus.provision import provision
from polymorph.config.settings import NatsSettings


async def _provision(settings: NatsSettings) -> int:
    try:
        # The monitoring endpoint is on the server's own loopback: what it says of syncing stands in nats.conf.
        made = await provision(settings, wait_s=60.0)
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
