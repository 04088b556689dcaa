"""Subject patterns as NATS reads them: `*` stands for one token, a final `>` for one or more."""


def matches(pattern: str, subject: str) -> bool:
    """Whether `subject` is one that `pattern` names."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))
