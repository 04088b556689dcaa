"""Whether the router is worth a question."""


class Circuit:
    """Opens at the first missing answer, so that only the requests under way then wait for it; a probe closes it."""

    def __init__(self) -> None:
        self.open = False

    def trip(self) -> bool:
        """Whether it was closed until now: whoever tripped it starts the probing."""
        was_closed = not self.open
        self.open = True
        return was_closed

    def close(self) -> None:
        self.open = False
