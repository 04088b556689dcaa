"""Generators of seeded requests that go on elsewhere, over a double of vLLM's runner with a sampler of the same draws."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymorph.engine import resume
from polymorph.engine.flight import FLIGHT_VARIABLE
from polymorph.engine.resume import DRAWS, MOST_DRAWS, hindrance, hook, supported


class Sampler:
    """Draws as vLLM's `TopKTopPSampler.forward_cpu`."""

    draws = 1

    def __call__(self, logits: Any, generators: dict[int, torch.Generator], k: Any, p: Any) -> list[int]:
        del logits, k, p
        return [
            int(torch.randint(0, 1 << 31, (1,), generator=each))
            for each in generators.values()
            for _ in range(self.draws)
        ]


def runner_class(draws: int = 1) -> Any:
    class Runner:
        speculative_config: Any = None

        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}
            self.input_batch = types.SimpleNamespace(req_id_to_index={}, generators={})
            self.sampler = types.SimpleNamespace(topk_topp_sampler=Sampler())
            self.sampler.topk_topp_sampler.draws = draws

        def load_model(self) -> str:
            return "loaded"

        def _update_states(self, scheduled: Any) -> str:
            for new in scheduled.scheduled_new_reqs:
                seed = new.sampling_params.seed
                generator = None if seed is None else torch.Generator().manual_seed(seed)
                self.requests[new.req_id] = types.SimpleNamespace(
                    generator=generator, sampling_params=new.sampling_params, output_token_ids=[]
                )
                index = self.input_batch.req_id_to_index[new.req_id] = len(self.input_batch.req_id_to_index)
                if generator is not None:
                    self.input_batch.generators[index] = generator
            return "updated"

    return Runner


def add(runner: Any, name: str, seed: int | None = 5, **extra: Any) -> None:
    sampling = types.SimpleNamespace(seed=seed, extra_args=extra or None)
    new = types.SimpleNamespace(req_id=name, sampling_params=sampling)
    assert runner._update_states(types.SimpleNamespace(scheduled_new_reqs=[new])) == "updated"


def step(runner: Any, name: str, *, discard: bool = False) -> int:
    """One step of one request; `discard` as after a part of its prompt."""
    generator = runner.input_batch.generators[runner.input_batch.req_id_to_index[name]]
    (token,) = runner.sampler.topk_topp_sampler(None, {0: generator}, None, None)
    if discard:
        generator.set_offset(generator.get_offset() - 4)
    else:
        runner.requests[name].output_token_ids.append(token)
    return token


def hooked(folder: Path, draws: int = 1) -> Any:
    cls = runner_class(draws)
    hook(cls, folder)
    runner = cls()
    assert runner.load_model() == "loaded"
    return runner


@given(cut=st.integers(0, 30), parts=st.integers(0, 4), seed=st.integers(0, 2**63 - 1))
def test_the_rest_is_drawn_as_without_the_cut(
    tmp_path_factory: pytest.TempPathFactory, cut: int, parts: int, seed: int
) -> None:
    runner = hooked(tmp_path_factory.mktemp("flight"))
    add(runner, "whole", seed)
    whole = [step(runner, "whole") for _ in range(40)]
    add(runner, "rest", seed, **{DRAWS: cut})
    for _ in range(parts):
        step(runner, "rest", discard=True)
    assert [step(runner, "rest") for _ in range(40 - cut)] == whole[cut:]


def test_a_generator_can_be_rewound_in_the_middle(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    add(runner, "plain")
    plain = [step(runner, "plain") for _ in range(6)]
    add(runner, "preempted")
    first = [step(runner, "preempted") for _ in range(3)]
    step(runner, "preempted", discard=True)
    assert first + [step(runner, "preempted") for _ in range(3)] == plain


def test_requests_without_a_seed_are_left_alone(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    add(runner, "r", None, **{DRAWS: 3})
    assert runner.requests["r"].generator is None
    assert runner.input_batch.generators == {}


@pytest.mark.parametrize("given", ["7", -3, None, 1.5, [2]])
def test_draws_that_are_none_are_not_made(tmp_path: Path, given: Any) -> None:
    runner = hooked(tmp_path)
    add(runner, "plain")
    add(runner, "odd", **{DRAWS: given})
    assert step(runner, "odd") == step(runner, "plain")


def test_draws_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MOST_DRAWS", 3)
    runner = hooked(tmp_path)
    add(runner, "plain")
    plain = [step(runner, "plain") for _ in range(4)]
    add(runner, "many", **{DRAWS: MOST_DRAWS * 1000})
    assert step(runner, "many") == plain[3]


def test_a_sampler_that_draws_otherwise_is_told_and_not_hooked(tmp_path: Path) -> None:
    runner = hooked(tmp_path, draws=2)
    assert not supported(tmp_path)
    assert hindrance(runner) == "vLLM's sampler draws otherwise"
    add(runner, "r", **{DRAWS: 3})
    assert type(runner.requests["r"].generator) is torch.Generator


def test_speculation_and_other_samplers_are_told(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    assert supported(tmp_path)
    runner.speculative_config = object()
    assert "draft tokens" in (hindrance(runner) or "")
    runner.speculative_config, runner.sampler = None, types.SimpleNamespace()
    assert "another one" in (hindrance(runner) or "")


def test_a_runner_without_the_methods_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        def load_model(self) -> None: ...

    before = Other.load_model
    hook(Other, tmp_path)
    assert Other.load_model is before
    assert "no _update_states" in caplog.text


def test_only_an_engines_worker_is_hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLIGHT_VARIABLE, str(tmp_path))
    monkeypatch.setattr(resume, "hook", lambda *_: pytest.fail("hooked"))
    resume.install()
