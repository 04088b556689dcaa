"""vLLM's metrics under their own names, one set for all engines of this process."""

from typing import Any

_FIRST: dict[str, Any] = {}


def lasting_metrics() -> Any:
    """A stat logger in place of vLLM's own one.

    vLLM's takes every `vllm:` metric out of the registry when it is made, so that a second engine would empty the
    metrics of the first while that one serves. Here the second engine goes on counting where the first one is.
    """
    from prometheus_client import REGISTRY  # noqa: PLC0415
    from vllm.v1.metrics.loggers import PrometheusStatLogger  # noqa: PLC0415 - only a worker has vLLM

    class Lasting(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            first = _FIRST.get("logger")
            if first is None or first.speculates != (vllm_config.speculative_config is not None):
                super().__init__(vllm_config, engine_indexes)
                self.speculates = vllm_config.speculative_config is not None
                _FIRST["logger"] = self
            else:
                self.__dict__.update(first.__dict__)
                self.vllm_config = vllm_config

        def log_engine_initialized(self) -> None:
            for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 - as vLLM does
                if getattr(collector, "_name", None) == "vllm:cache_config_info":
                    REGISTRY.unregister(collector)
            super().log_engine_initialized()

    return Lasting
