"""Settings of vLLM's scheduler that may change between two steps: where each is, and what it may be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

POLICIES = ("fcfs", "priority")


class Refusal(ValueError):
    """This setting is not changed; nothing is."""


def envelope(core: Any) -> dict[str, int]:
    """What the engine was compiled and allocated for: live settings stay within."""
    config = core.vllm_config.scheduler_config
    return {
        "max_num_seqs": int(config.max_num_seqs),
        "max_num_batched_tokens": int(config.max_num_batched_tokens),
        "smallest_batch": 1
        if config.enable_chunked_prefill
        else int(core.vllm_config.model_config.max_model_len),
    }


Check = Callable[[Any, Mapping[str, Any], Mapping[str, int]], str | None]


@dataclass(frozen=True)
class Knob:
    """One setting: `path` leads from EngineCore to the attribute that vLLM reads at each step."""

    name: str
    path: tuple[str, ...]
    rule: Check

    def there(self, core: Any) -> bool:
        try:
            self.read(core)
        except AttributeError:
            return False
        return True

    def read(self, core: Any) -> Any:
        """Raises `AttributeError` where this vLLM has it elsewhere, or not at all."""
        return getattr(self._holder(core), self.path[-1])

    def write(self, core: Any, value: Any) -> None:
        setattr(self._holder(core), self.path[-1], value)

    def check(self, wanted: Mapping[str, Any], limits: Mapping[str, int]) -> None:
        """Raises `Refusal` where the value does not fit; `wanted` are all settings as they would be."""
        complaint = self.rule(wanted[self.name], wanted, limits)
        if complaint is not None:
            raise Refusal(f"{self.name}={wanted[self.name]!r}: {complaint}")

    def _holder(self, core: Any) -> Any:
        for name in self.path[:-1]:
            core = getattr(core, name)
        return core


class PolicyKnob(Knob):
    """The order of the waiting: the queues are made anew with all that wait in them."""

    def read(self, core: Any) -> Any:
        queues = [getattr(core.scheduler, name) for name in _queues(core)]
        del queues
        return core.scheduler.policy.value

    def write(self, core: Any, value: Any) -> None:
        from vllm.v1.core.sched.request_queue import (  # noqa: PLC0415 - only an engine has vLLM
            SchedulingPolicy,
            create_request_queue,
        )

        policy = SchedulingPolicy(value)
        for name in _queues(core):
            queue = create_request_queue(policy)
            held = list(getattr(core.scheduler, name))
            for request in sorted(held, key=lambda each: each.arrival_time):
                queue.add_request(request)
            setattr(core.scheduler, name, queue)
        core.scheduler.policy = policy


def _queues(core: Any) -> tuple[str, ...]:
    """Some releases keep those that hold cache blocks, or were skipped, in a queue of their own."""
    others = ("kv_holding_waiting", "skipped_waiting")
    return ("waiting", *(name for name in others if hasattr(core.scheduler, name)))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _seqs(value: Any, wanted: Mapping[str, Any], limits: Mapping[str, int]) -> str | None:
    del wanted
    top = limits["max_num_seqs"]
    return None if _whole(value) and 1 <= value <= top else f"use 1 to {top}, the engine's envelope"


def _tokens(value: Any, wanted: Mapping[str, Any], limits: Mapping[str, int]) -> str | None:
    low = max(limits["smallest_batch"], wanted.get("max_num_seqs", 1))
    top = limits["max_num_batched_tokens"]
    if _whole(value) and low <= value <= top:
        return None
    return f"use {low} (a token for each sequence) to {top}, the engine's envelope"


def _threshold(value: Any, wanted: Mapping[str, Any], limits: Mapping[str, int]) -> str | None:
    del wanted, limits
    return None if _whole(value) and value >= 0 else "use a number of tokens, or 0 for none"


def _yes_or_no(value: Any, wanted: Mapping[str, Any], limits: Mapping[str, int]) -> str | None:
    del wanted, limits
    return None if isinstance(value, bool) else "use true or false"


def _policy(value: Any, wanted: Mapping[str, Any], limits: Mapping[str, int]) -> str | None:
    del wanted, limits
    return None if value in POLICIES else f"use {' or '.join(POLICIES)}"


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        # Not max_num_running_reqs, which the scheduler asserts: more may run when the limit is lowered.
        Knob("max_num_seqs", ("scheduler", "max_num_active_reqs"), _seqs),
        Knob("max_num_batched_tokens", ("scheduler", "max_num_scheduled_tokens"), _tokens),
        Knob(
            "long_prefill_token_threshold",
            ("scheduler", "scheduler_config", "long_prefill_token_threshold"),
            _threshold,
        ),
        Knob(
            "long_prefill_token_threshold_adaptive",
            ("scheduler", "adaptive_long_prefill_threshold"),
            _yes_or_no,
        ),
        Knob("scheduler_reserve_full_isl", ("scheduler", "scheduler_reserve_full_isl"), _yes_or_no),
        PolicyKnob("scheduling_policy", ("scheduler", "policy"), _policy),
    )
}
