"""Conversations made of the other domains: a question of a fixed pattern, and an answer that is real text."""

import random
from collections.abc import Iterator, Sequence

import corpus_records as records

Message = dict[str, str]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM = [
    "You are a helpful assistant.",
    "You are a careful engineer. Answer briefly.",
    "Answer with text only.",
]
CONTINUE_CODE = [
    "Continue this Python code:",
    "Complete the following function.",
    "What comes next in this file?",
]
CONTINUE_PROSE = [
    "Continue this text:",
    "Go on from here:",
    "Please finish the paragraph that begins like this:",
]
THANKS = ["Thanks! ", "Good. ", "Now another one. ", "And then: ", ""]


def render(messages: Sequence[Message], *, ask: bool = False) -> str:
    """What CHAT_TEMPLATE makes of `messages`; kept equal to it by a test."""
    text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return text + ("<|im_start|>assistant\n" if ask else "")


def code_turn(rng: random.Random, text: str) -> tuple[str, str]:
    lines = text.splitlines()
    at = rng.randrange(max(1, len(lines) - 20))
    middle, end = at + rng.randrange(4, 14), at + rng.randrange(16, 40)
    question = f"{rng.choice(CONTINUE_CODE)}\n```python\n" + "\n".join(lines[at:middle]) + "\n```"
    return question, "```python\n" + "\n".join(lines[middle:end]) + "\n```"


def prose_turn(rng: random.Random, text: str) -> tuple[str, str]:
    words = text.split(" ")
    at = rng.randrange(max(1, len(words) - 60))
    middle, end = at + rng.randrange(15, 50), at + rng.randrange(60, 150)
    return f"{rng.choice(CONTINUE_PROSE)}\n" + " ".join(words[at:middle]), " ".join(words[middle:end])


def record_turn(rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(sorted(records.RECORDS))
    answer = records.json_text(rng, kind)
    ask = rng.choice(
        ["Write a JSON record of kind {}.", "Give me an example {} as JSON.", "Show one {} in JSON."]
    )
    return ask.format(kind), f"```json\n{answer}\n```" if rng.random() < 0.5 else answer


def log_turn(rng: random.Random) -> tuple[str, str]:
    line = records.log_line(rng, records.moment(rng))
    date, clock, level, service, message = line.split(" ", 4)
    question, answer = rng.choice(
        [
            ("Which level has this log line?", level),
            ("Which service wrote this line?", f"The service {service} wrote it."),
            (
                "Turn this line into JSON.",
                f'{{"at": "{date} {clock}", "level": "{level}", "message": "{message}"}}',
            ),
            ("When was this written?", f"It was written on {date} at {clock}."),
        ]
    )
    return f"{question}\n{line}", answer


def turn(rng: random.Random, code: Sequence[str], prose: Sequence[str]) -> tuple[str, str]:
    kind = rng.choice(["code", "prose", "prose", "record", "log"])
    if kind == "code" and code:
        return code_turn(rng, rng.choice(code))
    if kind == "prose" and prose:
        return prose_turn(rng, rng.choice(prose))
    return record_turn(rng) if kind == "record" else log_turn(rng)


def conversation(rng: random.Random, code: Sequence[str], prose: Sequence[str]) -> list[Message]:
    messages: list[Message] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    for number in range(rng.choice([1, 1, 2, 3])):
        question, answer = turn(rng, code, prose)
        opening = rng.choice(THANKS) if number else ""
        messages.append({"role": "user", "content": opening + question})
        messages.append({"role": "assistant", "content": answer.strip()})
    return messages


def conversations(
    seed: int, code: Sequence[str], prose: Sequence[str], limit: int
) -> Iterator[list[Message]]:
    """Yields conversations, about `limit` characters in all; the same ones for the same seed and texts."""
    rng = random.Random(seed)
    total = 0
    while total < limit:
        messages = conversation(rng, code, prose)
        total += sum(len(message["content"]) for message in messages)
        yield messages
