"""Calls to an engine in processes of its own: which errors say no more than that there is no answer now."""

from collections.abc import Awaitable
from typing import TypeVar

from polymorph.bus.errors import Retryable

_T = TypeVar("_T")


async def answered(call: Awaitable[_T], dead: type[Exception], name: str = "") -> _T:
    """What the engine answers to `call`, which errors name by `name`.

    Raises:
        Retryable: it does not answer, and may later or is about to be found dead; or the call failed in it.
    """
    subject = f" {name}" if name else ""
    try:
        return await call
    except (RuntimeError, TimeoutError, dead) as error:
        raise Retryable(f"the engine does not answer{subject}: {error}") from error
    except Exception as error:
        # vLLM has no class of its own for a call that failed in the other process: time that ran out there, an error
        # in a worker.
        if type(error) is not Exception:
            raise
        raise Retryable(f"the engine failed to answer{subject}: {error}") from error
