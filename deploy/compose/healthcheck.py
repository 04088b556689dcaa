"""`healthcheck.py URL`: exit code 0 where the URL answers with 200. Standard library only."""

import sys
import urllib.error
import urllib.request


def main(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=4) as answer:  # noqa: S310 - the Dockerfile names the URL
            return 0 if answer.status == 200 else 1
    except (urllib.error.URLError, OSError) as error:
        print(f"{url}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
