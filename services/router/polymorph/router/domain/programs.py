"""Which worker served a program last: the program's prefix lies in the cache of that worker."""

import hashlib
from collections import OrderedDict
from typing import NamedTuple, Protocol

TTL_S = 900.0
LIMIT = 100_000


class Program(NamedTuple):
    """A program of a pool. Its id is a client's text: only a digest is kept, and leaves the router."""

    pool: str
    digest: str

    @classmethod
    def named(cls, pool: str, program_id: str) -> "Program":
        text = program_id.encode(errors="surrogatepass")
        return cls(pool, hashlib.blake2b(text, digest_size=16).hexdigest())


class Outbox(Protocol):
    """Takes what other routers should hear, at once."""

    def put(self, program: Program, worker_id: str) -> None: ...


class _Served(NamedTuple):
    worker_id: str
    at: float


class Programs:
    """The programs served last, at most `limit`, each for `ttl_s`. Pure: times are monotonic seconds, passed in."""

    def __init__(self, outbox: Outbox | None = None, *, ttl_s: float = TTL_S, limit: int = LIMIT) -> None:
        self.ttl_s = ttl_s
        self._outbox = outbox
        self._limit = limit
        self._served: OrderedDict[Program, _Served] = OrderedDict()

    def __len__(self) -> int:
        return len(self._served)

    @property
    def full(self) -> bool:
        return len(self._served) >= self._limit

    def home(self, program: Program, now: float) -> str | None:
        """The worker that served it last; it may be gone by now."""
        known = self._served.get(program)
        if known is None:
            return None
        if self._expired(known, now):
            del self._served[program]
            return None
        return known.worker_id

    def served(self, program: Program, worker_id: str, now: float) -> None:
        """We sent it there: other routers should hear of it."""
        self.heard(program, worker_id, now)
        if self._outbox is not None:
            self._outbox.put(program, worker_id)

    def heard(self, program: Program, worker_id: str, now: float) -> None:
        """Somebody else sent it there just now."""
        self._served[program] = _Served(worker_id, now)
        self._served.move_to_end(program)
        while len(self._served) > self._limit or self._expired(next(iter(self._served.values())), now):
            self._served.popitem(last=False)

    def loaded(self, program: Program, worker_id: str, now: float) -> bool:
        """Fills a gap from what was kept elsewhere, whose age is not known; whether there was one."""
        if self.home(program, now) is not None or self.full:
            return False
        self._served[program] = _Served(worker_id, now)
        self._served.move_to_end(program, last=False)
        return True

    def _expired(self, known: _Served, now: float) -> bool:
        return now - known.at > self.ttl_s
