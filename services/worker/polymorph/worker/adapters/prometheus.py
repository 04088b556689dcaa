"""vLLM's metrics under their own names, one set for all engines of this process."""

from typing import Any

_FIRST: dict[str, Any] = {}


def lasting_metrics() -> Any:
    """A stat logger in place of vLLM's own one.

    vLLM's takes every `vllm:` metric out of the registry when it is made, so that a second engine would empty the
    metrics of the first while that one serves. Here the second engine goes on counting where the first one is. What
    depends on the engine, its cache and its speculation, is counted anew.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger  # noqa: PLC0415 - only a worker has vLLM

    class Lasting(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            if "logger" not in _FIRST:
                super().__init__(vllm_config, engine_indexes)
                _FIRST["logger"] = self
                return
            self.__dict__.update(_FIRST["logger"].__dict__)
            self.vllm_config = vllm_config
            _unregister("vllm:spec_decode")
            self.spec_decoding_prom = self._spec_decoding_cls(
                vllm_config.speculative_config,
                ["model_name", "engine"],
                self.per_engine_labelvalues,
                is_diffusion=vllm_config.model_config.is_diffusion,
            )

        def log_engine_initialized(self) -> None:
            _unregister("vllm:cache_config_info")
            super().log_engine_initialized()

    return Lasting


def _unregister(prefix: str) -> None:
    from prometheus_client import REGISTRY  # noqa: PLC0415 - comes with vLLM

    for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 - as vLLM does
        if getattr(collector, "_name", "").startswith(prefix):
            REGISTRY.unregister(collector)
