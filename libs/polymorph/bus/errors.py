"""The small tree of errors that decides what happens to a message."""


class BusError(Exception):
    """Something went wrong on the bus."""


class Retryable(BusError):
    """Redeliver with a delay: the cause may be gone by then."""


class Poison(BusError):
    """Never redeliver: the message goes to the dead letters with this reason."""


class Fatal(BusError):
    """The process exits with this line: going on would do harm."""


class Unavailable(Retryable):
    """The bus does not answer."""


class Conflict(BusError):
    """A compare-and-set lost: somebody else wrote first."""


class NotFound(BusError):
    """No such key or object."""


class TooLarge(BusError):
    """An object is larger than its reader takes, and was not read."""


class Corrupt(BusError):
    """An object's bytes do not have the digest that names it."""
