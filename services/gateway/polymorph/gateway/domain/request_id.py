"""Ids of requests: the client's where it can stand in a header, a log line and a subject; else ours."""

import re

_VALID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def request_id(offered: str | None, made: str) -> str:
    """`offered` if it is valid, else `made`."""
    return offered if offered is not None and _VALID.fullmatch(offered) else made
