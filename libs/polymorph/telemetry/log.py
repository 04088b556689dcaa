"""Logs: one line a fact, with time, service and level; never a prompt, never a secret."""

import logging
import sys


def configure(service: str, level: str = "INFO") -> None:
    """Sets up the root logger of a process."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("nats").setLevel(logging.WARNING)
