"""When it is tried again what failed as nobody had foreseen."""

_AGAIN_S = (1.0, 2.0, 5.0, 10.0, 30.0)


def again_s(failures: int) -> float:
    """Seconds after so many failures in a row, of which there was one."""
    return _AGAIN_S[min(failures, len(_AGAIN_S)) - 1]
