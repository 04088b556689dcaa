"""The corpus as token ids: one array a domain and split, and seeded batches of it."""

from pathlib import Path

import corpus
import numpy as np
import numpy.typing as npt
from small_models import END_OF_TEXT
from transformers import PreTrainedTokenizerFast

Ids = npt.NDArray[np.uint16]
# How often each domain is drawn: chat is a mixture of the others.
WEIGHTS = {"code": 0.3, "prose": 0.3, "structured": 0.15, "chat": 0.25}


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Ids:
    """The documents one after the other, each ended by the end-of-text token."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    ids: list[int] = []
    for encoded in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
        ids.extend(encoded.ids)
        ids.append(end)
    return np.array(ids, dtype=np.uint16)


def domain_ids(
    tokenizer: PreTrainedTokenizerFast, domain: str, split: str, *, limit: int | None = None
) -> Ids:
    return encode(tokenizer, corpus.documents(domain, split, limit=limit))


def cached_ids(tokenizer: PreTrainedTokenizerFast, cache: Path, key: str) -> dict[str, Ids]:
    """Training ids of each domain; `key` names tokenizer and corpus, a file under another key is not read."""
    path = cache / f"train-{key}.npz"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        arrays = {domain: domain_ids(tokenizer, domain, "train") for domain in corpus.DOMAINS}
        part = path.with_suffix(".part.npz")
        np.savez(part, allow_pickle=False, **arrays)
        part.rename(path)
    with np.load(path) as stored:
        return {domain: stored[domain] for domain in corpus.DOMAINS}


def batch(ids: dict[str, Ids], rows: int, length: int, seed: int, step: int) -> npt.NDArray[np.int64]:
    """`rows` windows of `length` tokens. It depends on seed and step alone, so training goes on where it stopped."""
    rng = np.random.default_rng([seed, step])
    names = list(WEIGHTS)
    chosen = rng.choice(len(names), size=rows, p=list(WEIGHTS.values()))
    windows = []
    for index in chosen:
        source = ids[names[index]]
        at = int(rng.integers(0, len(source) - length))
        windows.append(source[at : at + length].astype(np.int64))
    return np.stack(windows)
