"""What the log says while the engine starts."""

USUAL_START_S = 180.0


def start_told(seconds: float) -> str:
    """How long it has taken, and what is usual while that is still so."""
    if seconds <= USUAL_START_S:
        expected = f"up to {USUAL_START_S / 60:.0f} minutes where the model is compiled anew"
    else:
        expected = "longer than usual: the engine's own lines above tell what it does"
    return f"the engine is starting ({seconds:.0f} s so far; {expected})"
