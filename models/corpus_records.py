"""Generated structured text: JSON records, log lines and tables, from a seeded generator alone."""

import json
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

FIRST = [
    "Ada",
    "Alan",
    "Barbara",
    "Claude",
    "Dennis",
    "Edsger",
    "Frances",
    "Grace",
    "Hedy",
    "John",
    "Ken",
    "Leslie",
    "Margaret",
    "Niklaus",
    "Radia",
    "Tony",
]
LAST = [
    "Allen",
    "Backus",
    "Dijkstra",
    "Hamilton",
    "Hoare",
    "Hopper",
    "Knuth",
    "Lamport",
    "Liskov",
    "Lovelace",
    "Perlman",
    "Ritchie",
    "Turing",
    "Wirth",
]
CITIES = [
    "Amsterdam",
    "Berlin",
    "Cairo",
    "Dublin",
    "Hamburg",
    "Kyoto",
    "Lagos",
    "Lima",
    "Lisbon",
    "Nairobi",
    "Oslo",
    "Porto",
    "Quito",
    "Seoul",
    "Tunis",
]
SERVICES = [
    "auth",
    "billing",
    "cart",
    "catalog",
    "gateway",
    "inventory",
    "mailer",
    "orders",
    "payments",
    "scheduler",
    "search",
    "storage",
]
LEVELS = ["DEBUG", "INFO", "INFO", "INFO", "INFO", "WARNING", "ERROR"]
PATHS = [
    "/v1/orders",
    "/v1/orders/{id}",
    "/v1/users/{id}",
    "/healthz",
    "/v1/search?q={word}",
    "/static/app.js",
]
WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "harbor",
    "inlet",
    "jetty",
    "knoll",
    "lagoon",
    "meadow",
    "orchard",
    "prairie",
]
PARTS = [
    "bolt",
    "bracket",
    "cable",
    "gasket",
    "hinge",
    "lever",
    "panel",
    "pulley",
    "sensor",
    "spring",
    "valve",
]
MESSAGES = {
    "DEBUG": ["cache hit for key {word}:{n}", "retry budget is {n} of 100", "loaded {n} rows in {ms} ms"],
    "INFO": ["request {id} finished in {ms} ms", "worker {n} started", "user {name} signed in from {city}"],
    "WARNING": [
        "queue {word} is {n} percent full",
        "request {id} was slow: {ms} ms",
        "clock drift of {ms} ms",
    ],
    "ERROR": [
        "could not connect to {service}: timed out after {ms} ms",
        "request {id} failed with status 50{d}",
    ],
}


def moment(rng: random.Random) -> datetime:
    return datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=rng.randrange(2 * 365 * 86_400))


def identifier(rng: random.Random) -> str:
    return f"{rng.getrandbits(32):08x}"


def person(rng: random.Random) -> dict[str, Any]:
    first, last = rng.choice(FIRST), rng.choice(LAST)
    return {
        "id": rng.randrange(1, 10_000),
        "name": f"{first} {last}",
        "email": f"{first.lower()}.{last.lower()}@example.com",
        "city": rng.choice(CITIES),
        "active": rng.random() < 0.8,
        "created_at": moment(rng).isoformat(),
    }


def order(rng: random.Random) -> dict[str, Any]:
    items = [
        {
            "sku": f"{part[:3].upper()}-{rng.randrange(100, 999)}",
            "name": part,
            "quantity": rng.randrange(1, 9),
        }
        for part in rng.sample(PARTS, rng.randrange(1, 5))
    ]
    return {
        "order_id": identifier(rng),
        "customer": rng.randrange(1, 10_000),
        "status": rng.choice(["open", "paid", "shipped", "delivered", "cancelled"]),
        "items": items,
        "total_cents": rng.randrange(500, 90_000),
        "currency": rng.choice(["EUR", "USD", "JPY"]),
    }


def metric(rng: random.Random) -> dict[str, Any]:
    return {
        "service": rng.choice(SERVICES),
        "host": f"node-{rng.randrange(1, 32):02d}",
        "cpu_percent": round(rng.uniform(0, 100), 1),
        "memory_mb": rng.randrange(64, 16_384),
        "tags": {"region": rng.choice(["eu-west", "us-east", "ap-south"]), "tier": rng.choice(["a", "b"])},
        "at": moment(rng).isoformat(),
    }


def tool_call(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(["get_weather", "find_order", "search_parts", "list_services"])
    arguments = {
        "get_weather": {"city": rng.choice(CITIES), "unit": rng.choice(["celsius", "fahrenheit"])},
        "find_order": {"order_id": identifier(rng)},
        "search_parts": {"query": rng.choice(PARTS), "limit": rng.choice([5, 10, 20])},
        "list_services": {"region": rng.choice(["eu-west", "us-east", "ap-south"])},
    }[name]
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


RECORDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "person": person,
    "order": order,
    "metric": metric,
    "tool call": tool_call,
}


def json_text(rng: random.Random, kind: str) -> str:
    return json.dumps(RECORDS[kind](rng), indent=rng.choice([None, 2]))


def filled(template: str, rng: random.Random) -> str:
    return template.format(
        id=identifier(rng),
        n=rng.randrange(1, 100),
        d=rng.randrange(0, 4),
        ms=rng.randrange(1, 3_000),
        word=rng.choice(WORDS),
        name=rng.choice(FIRST).lower(),
        city=rng.choice(CITIES),
        service=rng.choice(SERVICES),
    )


def log_line(rng: random.Random, at: datetime) -> str:
    level = rng.choice(LEVELS)
    message = filled(rng.choice(MESSAGES[level]), rng)
    return f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d} {level} {rng.choice(SERVICES)} {message}"


def access_line(rng: random.Random, at: datetime) -> str:
    status = rng.choice([200, 200, 200, 200, 201, 304, 404, 500])
    client = f"10.0.{rng.randrange(4)}.{rng.randrange(256)}"
    path = filled(rng.choice(PATHS), rng)
    return f'{client} - - [{at:%d/%b/%Y:%H:%M:%S} +0000] "GET {path} HTTP/1.1" {status} {rng.randrange(100, 40_000)}'


def log_text(rng: random.Random) -> str:
    line = rng.choice([log_line, access_line])
    at = moment(rng)
    lines = []
    for _ in range(rng.randrange(10, 40)):
        at += timedelta(milliseconds=rng.randrange(1, 4_000))
        lines.append(line(rng, at))
    return "\n".join(lines) + "\n"


def table_text(rng: random.Random) -> str:
    start = rng.randrange(1, 5_000)
    rows = [
        f"{number},{rng.choice(PARTS)},{rng.randrange(1, 500)},{rng.choice(CITIES)}"
        for number in range(start, start + rng.randrange(8, 30))
    ]
    return "\n".join(["id,part,quantity,city", *rows]) + "\n"


def record_lines(rng: random.Random) -> str:
    kind = rng.choice(sorted(RECORDS))
    return "\n".join(json.dumps(RECORDS[kind](rng)) for _ in range(rng.randrange(3, 12))) + "\n"


def record_text(rng: random.Random) -> str:
    return json_text(rng, rng.choice(sorted(RECORDS))) + "\n"


MAKERS: list[Callable[[random.Random], str]] = [log_text, table_text, record_lines, record_text]


def documents(seed: int, limit: int) -> Iterator[str]:
    """Yields documents, about `limit` characters in all; the same ones for the same seed."""
    rng = random.Random(seed)
    total = 0
    while total < limit:
        text = rng.choice(MAKERS)(rng)
        total += len(text)
        yield text
