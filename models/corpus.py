"""The text that the small models learn from: four domains, each with a held-out tenth.

Run as a program, it prints how much of each domain this machine has.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache

import corpus_chat as chat
import corpus_records as records
import corpus_sources as sources

SEED = 20261130
# Raise it when other text comes out of the same machine: what was trained on the old text is then made again.
VERSION = 1
DOMAINS = ("code", "prose", "structured", "chat")
SPLITS = ("train", "heldout")
# Characters a domain: more than the training budget reads once.
LIMITS = {"code": 6_000_000, "prose": 6_000_000, "structured": 3_000_000, "chat": 6_000_000}
TENTH = 10


def documents(domain: str, split: str, *, limit: int | None = None, seed: int = SEED) -> list[str]:
    """The documents of one domain and split, up to about `limit` characters.

    What is held out depends on a file's name (code, prose) or on the seed (structured); conversations are made of
    texts of their own split. So no split's text is in the other one, whatever the limit.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; there are {', '.join(SPLITS)}")
    if domain not in MAKERS:
        raise ValueError(f"no domain {domain!r}; there are {', '.join(DOMAINS)}")
    held = split == "heldout"
    full = LIMITS[domain] // TENTH if held else LIMITS[domain]
    return list(MAKERS[domain](held, min(full, limit or full), seed))


def split_seed(seed: int, name: str, *, held: bool) -> int:
    return sources.spread(f"{seed}/{name}/{'heldout' if held else 'train'}")


@lru_cache(maxsize=8)
def code(held: bool, limit: int, _seed: int) -> tuple[str, ...]:
    return tuple(text for _, text in sources.split_texts(sources.python_files(), held=held, limit=limit))


prose_files = lru_cache(maxsize=1)(sources.prose_files)


@lru_cache(maxsize=8)
def prose(held: bool, limit: int, _seed: int) -> tuple[str, ...]:
    return tuple(text for _, text in sources.split_texts(prose_files(), held=held, limit=limit))


def structured(held: bool, limit: int, seed: int) -> tuple[str, ...]:
    return tuple(records.documents(split_seed(seed, "structured", held=held), limit))


def chat_texts(held: bool, limit: int, seed: int) -> tuple[str, ...]:
    made = chat.conversations(
        split_seed(seed, "chat", held=held), code(held, limit, seed), prose(held, limit, seed), limit
    )
    return tuple(chat.render(messages) for messages in made)


MAKERS: dict[str, Callable[[bool, int, int], tuple[str, ...]]] = {
    "code": code,
    "prose": prose,
    "structured": structured,
    "chat": chat_texts,
}


def digest(texts: list[str]) -> str:
    """Names a set of documents by its content."""
    total = hashlib.sha256()
    for text in texts:
        total.update(text.encode())
        total.update(b"\0")
    return total.hexdigest()[:16]


def main() -> None:
    for domain in DOMAINS:
        for split in SPLITS:
            texts = documents(domain, split)
            size = sum(len(text) for text in texts)
            print(f"{domain:<10} {split:<8} {len(texts):>6} documents {size:>9} characters  {digest(texts)}")


if __name__ == "__main__":
    main()
