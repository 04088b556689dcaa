"""What `gpu_hotswap.py` swaps kernels under: a block of a transformer, and a thread of requests that checks its outputs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from polymorph.engine.gpu import reference
from polymorph.engine.gpu.graphs import GraphSet

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
EPS = 1e-6


@dataclass
class Block:
    """Layers over the slots' operators, with static inputs and a few requests by bucket."""

    dtype: Any
    device: Any
    hidden: int = 2048
    inner: int = 5632
    layers: int = 2
    patterns: int = 3
    weights: list[tuple[Any, ...]] = field(default_factory=list)
    inputs: dict[int, Any] = field(default_factory=dict)
    requests: dict[int, list[tuple[Any, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def drawn(*shape: int, scale: float = 1.0) -> Any:
            values = torch.randn(shape, generator=generator) * scale
            return values.to(device=self.device, dtype=self.dtype)

        for _ in range(self.layers):
            up = drawn(2 * self.inner, self.hidden, scale=self.hidden**-0.5)
            down = drawn(self.hidden, self.inner, scale=self.inner**-0.5)
            self.weights.append((drawn(self.hidden), up, down, drawn(self.hidden)))
        for bucket in BUCKETS:
            self.inputs[bucket] = drawn(bucket, self.hidden)
            given = [drawn(bucket, self.hidden) for _ in range(self.patterns)]
            self.requests[bucket] = [(x, self._run(x, self._exact)) for x in given]

    def body(self, bucket: int) -> Any:
        """What is captured."""
        return self._run(
            self.inputs[bucket], lambda name, *given: getattr(torch.ops.polymorph_gpu, name)(*given)
        )

    def operations(self) -> list[tuple[str, tuple[int, ...]]]:
        return [
            ("rms_norm", (self.hidden,)),
            ("linear", (2 * self.inner, self.hidden)),
            ("silu_and_mul", (self.inner,)),
            ("linear", (self.hidden, self.inner)),
            ("fused_add_rms_norm", (self.hidden,)),
        ]

    def _run(self, x: Any, call: Callable[..., Any]) -> Any:
        for first, up, down, second in self.weights:
            wide = call("linear", call("rms_norm", x, first, EPS), up, None)
            y = call("linear", call("silu_and_mul", wide), down, None)
            x, _ = call("fused_add_rms_norm", y, x, second, EPS)
        return x

    def _exact(self, name: str, *given: Any) -> Any:
        results = tuple(exact.to(self.dtype) for exact, _ in reference.bounds(name, given))
        return results if len(results) > 1 else results[0]

    def tolerance(self) -> float:
        """Of the root mean square: each operation rounds once, and a few elements round to the other side."""
        return 2.0 * float(torch.finfo(self.dtype).eps)


@dataclass
class Serving:
    """A thread of requests on two side streams, which checks each output on the device."""

    graphs: GraphSet
    block: Block
    runs: int = 0
    spans: list[float] = field(default_factory=list)
    error: BaseException | None = None
    stopping: bool = False

    def __post_init__(self) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.wrong = torch.zeros(1, dtype=torch.int64, device=self.block.device)
        self.worst = torch.zeros(1, dtype=torch.float32, device=self.block.device)
        torch.cuda.synchronize()

    @contextmanager
    def going(self) -> Iterator[None]:
        self.stopping = False
        thread = threading.Thread(target=self._serve)
        thread.start()
        try:
            yield
        finally:
            self.stopping = True
            thread.join()
            if self.error is not None:
                raise RuntimeError(f"the serving thread ended: {self.error}") from self.error

    def _serve(self) -> None:
        try:
            while not self.stopping:
                self._request()
        except BaseException as error:  # noqa: BLE001 - told by `going`
            self.error = error

    def _request(self) -> None:
        began = time.perf_counter()
        bucket = BUCKETS[self.runs % len(BUCKETS)]
        x, expected = self.block.requests[bucket][self.runs % self.block.patterns]
        stream = self.streams[(self.runs // 3) % 2]
        with torch.cuda.stream(stream), torch.inference_mode():
            y = self.graphs.run(bucket, fill=lambda: self.block.inputs[bucket].copy_(x))
            off = (y.float() - expected.float()).norm() / expected.float().norm()
            off = torch.nan_to_num(off, nan=float("inf"))
            self.wrong += off > self.block.tolerance()
            torch.maximum(self.worst, off.reshape(1), out=self.worst)
        stream.synchronize()
        self.runs += 1
        self.spans.append(time.perf_counter() - began)
