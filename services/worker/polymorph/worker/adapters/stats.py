"""vLLM's stat logger, turned into our counts."""

from dataclasses import dataclass
from typing import Any, Protocol

from polymorph.worker.domain.steps import Load


@dataclass(frozen=True)
class FinishedRequest:
    """What the engine counted for one request; times in seconds."""

    engine_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float | None


class StatSink(Protocol):
    """Who wants to know. Called in the event loop, once an engine step at most: quick and without waiting."""

    def stepped(self, tokens: int, seconds: float) -> None: ...

    def produced(self, tokens: int) -> None: ...

    def loaded(self, load: Load) -> None: ...

    def finished(self, request: FinishedRequest) -> None: ...


def stat_logger(sink: StatSink) -> Any:
    """A factory that vLLM makes one logger an engine with."""
    from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: PLC0415 - only a worker has vLLM

    class Counting(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            del mm_cache_stats, engine_idx
            if scheduler_stats is not None:
                _scheduler(sink, scheduler_stats)
            if iteration_stats is not None:
                _iteration(sink, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Nothing to say: the worker tells when it serves."""

    return Counting


def _scheduler(sink: StatSink, stats: Any) -> None:
    sink.loaded(
        Load(
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            kv_used=stats.kv_cache_usage,
        )
    )
    details = stats.iteration_details
    if details is not None and not details.is_dummy:
        sink.stepped(details.num_ctx_tokens + details.num_generation_tokens, details.elapsed_ms / 1e3)


def _iteration(sink: StatSink, stats: Any) -> None:
    if stats.num_generation_tokens:
        sink.produced(stats.num_generation_tokens)
    for request in stats.finished_requests:
        sink.finished(
            FinishedRequest(
                engine_id=request.request_id or "",
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=request.num_cached_tokens,
                output_tokens=request.num_generation_tokens,
                ttft_s=max(0.0, request.queued_time + request.prefill_time),
                tpot_s=request.mean_time_per_output_token or None,
            )
        )
