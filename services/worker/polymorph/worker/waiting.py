"""Waits that end early where something else should come now."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from polymorph.bus.errors import Retryable

T = TypeVar("T")


class Overtaken(Retryable):
    """A change that still waited is given up: nothing has been changed yet."""


class News(asyncio.Event):
    """Also wakes, each time that it is set, whoever waits for something else meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._next = asyncio.Event()

    def set(self) -> None:
        super().set()
        self._next.set()
        self._next = asyncio.Event()

    def next(self) -> "asyncio.Task[bool]":
        """Done when there is more news than at the time of this call."""
        return asyncio.ensure_future(self._next.wait())


class Waiting:
    """Of one change, which looks at each news whether it should still come: `overtaken` says why not."""

    def __init__(self, news: News, overtaken: Callable[[], str | None]) -> None:
        self._news = news
        self._overtaken = overtaken

    def check(self) -> None:
        """Raises `Overtaken` where something else should come."""
        reason = self._overtaken()
        if reason is not None:
            raise Overtaken(reason)

    async def on(self, awaited: Awaitable[T]) -> T:
        """The result of `awaited`, which is given up as soon as something else should come.

        Raises:
            Overtaken: it should.
        """
        waited = asyncio.ensure_future(awaited)
        heard: asyncio.Task[bool] | None = None
        try:
            while not waited.done():
                self.check()
                heard = self._news.next()
                await asyncio.wait({waited, heard}, return_when=asyncio.FIRST_COMPLETED)
                heard.cancel()
            self.check()
            return waited.result()
        finally:
            waited.cancel()
            if heard is not None:
                heard.cancel()


def whatever_comes() -> Waiting:
    """For a change that nothing overtakes."""
    return Waiting(News(), lambda: None)
