"""Salt and scheduling policy on vLLM's own requests, hashes and queues, beside a model."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from polymorph.engine import plugin
from polymorph.engine.knobs import KNOBS

pytestmark = [pytest.mark.engine]

BLOCK = 4
PROMPT = list(range(10))


class Core(EngineCore):  # type: ignore[misc]
    """Takes requests as EngineCore does; only scheduler and model are left out."""

    def __init__(self) -> None:
        plugin.register()
        init_none_hash(sha256)
        self.mm_receiver_cache = None
        self.request_block_hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = SimpleNamespace(requests={}, policy=SchedulingPolicy.FCFS)
        self.scheduler.waiting = create_request_queue(SchedulingPolicy.FCFS)

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.scheduler.requests[request.request_id] = request
        self.scheduler.waiting.add_request(request)


def sent(name: str, salt: str | None = None, priority: int = 0, arrival: float = 0.0) -> Any:
    fields = {
        "request_id": name,
        "client_index": 0,
        "prompt_token_ids": list(PROMPT),
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=4),
        "pooling_params": None,
        "arrival_time": arrival,
        "lora_request": None,
        "cache_salt": salt,
        "priority": priority,
        "trace_headers": None,
        "resumable": False,
        "session_id": None,
        "kv_hints": None,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "abort_immediately": False,
        "current_wave": 0,
    }
    return SimpleNamespace(**fields)


def taken(core: Core, name: str, salt: str | None = None, **fields: Any) -> Request:
    request, wave = core.preprocess_add_request(sent(name, salt, **fields))
    core.add_request(request, wave)
    return request


def test_no_request_reads_cache_of_another_revision() -> None:
    core = Core()
    plain = list(taken(core, "plain").block_hashes)
    own = list(taken(core, "own", "mine").block_hashes)
    assert len(plain) == 2
    waiting, started = taken(core, "waiting", "mine"), taken(core, "started")
    started.num_computed_tokens = 4
    between, wave = core.preprocess_add_request(sent("between"))
    assert core.polymorph_salt("r-1")["ok"]
    core.add_request(between, wave)
    first = list(taken(core, "first").block_hashes)
    assert between.block_hashes == first
    assert not set(first) & set(plain)
    mine = list(taken(core, "mine", "mine").block_hashes)
    assert waiting.block_hashes == mine
    assert not set(mine) & {*plain, *own, *first}
    assert started.block_hashes == plain
    assert core.polymorph_salt("r-2")["ok"]
    assert not set(taken(core, "second").block_hashes) & {*plain, *first}
    assert not set(waiting.block_hashes) & set(mine)
    assert core.polymorph_salt(None)["ok"]
    assert list(taken(core, "again").block_hashes) == plain
    assert waiting.block_hashes == own
    assert waiting.cache_salt == "mine"


def test_who_waits_is_in_the_order_of_the_policy() -> None:
    core = Core()
    for name, priority, arrival in (("a", 5, 1.0), ("b", 1, 2.0), ("c", 1, 3.0)):
        taken(core, name, priority=priority, arrival=arrival)
    policy = KNOBS["scheduling_policy"]
    policy.write(core, "priority")
    assert policy.read(core) == "priority"
    taken(core, "d", priority=0, arrival=4.0)
    assert [request.request_id for request in core.scheduler.waiting] == ["d", "b", "c", "a"]
    policy.write(core, "fcfs")
    assert [request.request_id for request in core.scheduler.waiting] == ["a", "b", "c", "d"]
    assert core.scheduler.policy is SchedulingPolicy.FCFS


def test_nothing_of_vllms_own_is_replaced() -> None:
    before = dict(vars(EngineCore))
    plugin.register()
    assert all(vars(EngineCore)[name] is value for name, value in before.items() if callable(value))
    assert callable(EngineCore.polymorph_set)
