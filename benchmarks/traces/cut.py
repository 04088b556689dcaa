"""Cuts a consecutive piece out of an Azure LLM inference trace (2023) and writes it with plain column names.

    python benchmarks/traces/cut.py AzureLLMInferenceTrace_conv.csv azure_2023_conv_sample.csv

The published file has the columns TIMESTAMP, ContextTokens, GeneratedTokens; see README.md for source and licence.
"""

import argparse
import csv
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path

ROWS = 400
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
PUBLISHED = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def moment(text: str) -> datetime:
    """The publisher writes seven decimals, one more than datetime reads."""
    return datetime.fromisoformat(text[:26])


def piece(source: Path, skip: int, rows: int) -> Iterator[tuple[str, str, str]]:
    """Yields `rows` consecutive requests; arrivals count from the first of them, in seconds."""
    with source.open(newline="") as published:
        reader = csv.DictReader(published)
        if tuple(reader.fieldnames or ()) != PUBLISHED:
            raise SystemExit(f"{source} has columns {reader.fieldnames}, expected {', '.join(PUBLISHED)}")
        start = None
        for row in islice(reader, skip, skip + rows):
            at = moment(row["TIMESTAMP"])
            start = start or at
            yield f"{(at - start).total_seconds():.3f}", row["ContextTokens"], row["GeneratedTokens"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--skip", type=int, default=0, help="requests to leave out first")
    parser.add_argument("--rows", type=int, default=ROWS)
    options = parser.parse_args()
    with options.target.open("w", newline="") as sink:
        writer = csv.writer(sink, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(piece(options.source, options.skip, options.rows))


if __name__ == "__main__":
    main()
