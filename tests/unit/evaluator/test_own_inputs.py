"""With capture off the evaluator's own engine gives inputs, on bundled texts that look like the traffic."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polymorph.evaluator.adapters.engine_lane import EngineGone
from polymorph.evaluator.domain.texts import TEXTS, likeness, written
from polymorph.evaluator.gates.own_inputs import OwnEngineInputs
from polymorph.evaluator.gates.pipeline import Job
from polymorph.events.state import EMPTY
from polymorph.events.types import EvaluateCandidate
from polymorph.events.values import Gate
from polymorph.kernels.schema import Solution, Workload

K = 8
DEFINITION = f"gemm_n16_k{K}_f32"
PROMPTS = {"mean": 90, "p10": 20, "p50": 60, "p90": 200, "p99": 400}


def workload(**replay: Any) -> Workload:
    extension = {"m_weights": {"4": 1.0}, "weight": 0.4, "replay": replay}
    return Workload.model_validate({"uuid": "w", "axes": {"M": 4}, "inputs": {}, "x_polymorph": extension})


def test_prompts_have_the_lengths_of_the_traffic() -> None:
    like = likeness(
        workload(prompt_tokens=PROMPTS, output_tokens={"p50": 11}), 5, max_num_seqs=32, max_model_len=1024
    )
    assert like.prompt_tokens == (20, 40, 60, 130, 200)
    assert like.output_tokens == 11


def test_what_is_made_fits_beside_serving() -> None:
    long = workload(
        prompt_tokens={name: 50 * value for name, value in PROMPTS.items()}, output_tokens={"p50": 900}
    )
    like = likeness(long, 32, max_num_seqs=32, max_model_len=256)
    assert len(like.prompt_tokens) == 32
    assert sum(like.prompt_tokens) <= 1100
    assert max(like.prompt_tokens) <= 128
    assert like.output_tokens <= 24


def test_a_prefill_of_so_many_tokens_is_one_step_of_them() -> None:
    like = likeness(workload(prompt_tokens=PROMPTS), 512, max_num_seqs=32, max_model_len=2048)
    assert 500 <= sum(like.prompt_tokens) <= 524


def test_texts_are_of_the_traffics_domains() -> None:
    told = workload(domains={"code": 0.75, "prose": 0.2, "unknown": 0.05})
    like = likeness(told, 8, max_num_seqs=32, max_model_len=1024)
    assert sorted(set(like.domains)) == ["code", "prose"]
    assert like.domains.count("code") == 6
    assert like.about()["domains"] == {"code": 0.75, "prose": 0.25}
    every = likeness(workload(domains={"unknown": 1.0}), 8, max_num_seqs=32, max_model_len=1024)
    assert set(every.domains) == set(TEXTS), "of an unknown domain all texts are tried"


def test_prompts_are_of_their_domains_tokens_and_share_no_beginning() -> None:
    like = likeness(workload(domains={"code": 1.0}), 4, max_num_seqs=32, max_model_len=1024)
    made = written(like, {"code": list(range(50)), "prose": [99]})
    assert [len(prompt) for prompt in made] == list(like.prompt_tokens)
    assert len({prompt[0] for prompt in made}) == 4
    assert 99 not in made[0]


class Lane:
    """An engine that writes files; `ms` are the numbers of rows of the calls that it has, `refused` what it does not do."""

    def __init__(self, ms: tuple[int, ...], *, warm: bool = True, refused: tuple[str, ...] = ()) -> None:
        self.ms, self.warm, self.refused = ms, warm, refused
        self.captures: list[dict[str, Any]] = []
        self.prompts: list[list[list[int]]] = []
        self.armed = False
        self.running = False
        self.launch = type("Launch", (), {"max_num_seqs": 32, "max_model_len": 256})()

    def start(self) -> None:
        self.warm = True

    def stop(self) -> None:
        self.warm = self.armed = self.running = False

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        if do in self.refused:
            raise RuntimeError(f"no {do}")
        if do == "tokenize":
            return {"tokens": [list(range(40)) for _ in fields["texts"]]}
        if do == "add":
            self.prompts.append(fields["prompts"])
            self.running = True
        if do == "finish":
            if fields["run"] and "run" in self.refused:
                raise RuntimeError("no step")
            self.running = False
        return {}

    def rpc(self, method: str, *arguments: Any, **named: Any) -> Any:
        if method in self.refused:
            raise RuntimeError(f"no {method}")
        if method == "slots_capture":
            if arguments[0] != DEFINITION:
                return {"ok": False, "reason": f"no slot has the definition {arguments[0]}"}
            self.captures.append(named)
            self.armed = True
            return {"ok": True}
        self.armed = False
        if method == "slots_capture_stop":
            return {"ok": True}
        folder, wanted = Path(arguments[0]), self.captures[-1]
        folder.mkdir()
        calls = []
        for m in self.ms:
            if wanted["min_m"] <= m <= wanted["max_m"]:
                path = folder / f"{len(calls)}.safetensors"
                save_file({"x": torch.full((m, K), float(m))}, str(path))
                calls.append({"path": str(path)})
        return {"ok": True, "calls": calls}


def job(definition: str = DEFINITION, digest: str = "w", **replay: Any) -> Job:
    order = EvaluateCandidate(
        pool="p", search_id="s", candidate_id="c", evaluation_id="e", hardware="h", definition=definition,
        solution="", workload=digest, incumbent=EMPTY, until=Gate.G2_CORRECT, min_m=3, max_m=8,
    )  # fmt: skip
    solution = Solution(name="s", definition=definition, author="a", spec={}, sources=())
    return Job(order, solution, workload(**replay))


def test_the_workload_says_that_its_inputs_are_our_own_engines() -> None:
    lane = Lane((4, 4, 300))
    made = OwnEngineInputs(lane).of(job(domains={"code": 1.0}, prompt_tokens=PROMPTS), wait=False)
    assert [(call.m, call.source) for call in made.calls] == [(4, "own-engine")] * 2
    assert (lane.captures[0]["min_m"], lane.captures[0]["max_m"]) == (3, 8)
    assert len(lane.prompts[0]) == 4
    told = made.workload(["a" * 64, "b" * 64], 0.4)
    assert told.axes == {"M": 4}
    assert told.inputs == {"x": {"type": "safetensors", "path": "a" * 64, "tensor_key": "x"}}
    extension = told.x_polymorph
    assert (extension.privacy, extension.weight, extension.signature) == ("own-engine", 0.4, "4")
    assert "engine" in (extension.source_position or "")
    texts = (extension.model_extra or {})["texts"]
    assert texts["domains"] == {"code": 1.0}
    assert texts["prompt_tokens"] == list(map(len, lane.prompts[0]))


def test_where_no_step_has_the_size_rows_of_larger_ones_are_cut() -> None:
    lane = Lane((300,))
    made = OwnEngineInputs(lane).of(job(), wait=False)
    assert [call.m for call in made.calls] == [300]
    assert [each["max_m"] for each in lane.captures] == [8, 1 << 30]


def test_it_is_made_once_for_a_workload_and_never_for_a_cold_engine() -> None:
    lane = Lane((4,), warm=False)
    own = OwnEngineInputs(lane)
    assert own.of(job(), wait=False).calls == ()
    assert own.of(job(), wait=True) is own.of(job(), wait=False)
    assert own.of(job(digest="another"), wait=False) is not own.of(job(), wait=False)
    assert len(lane.captures) == 2


@pytest.mark.parametrize("error", [EngineGone("it ended"), ValueError("no slot")])
def test_an_engine_that_gives_none_holds_up_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = Lane((4,))

    def gone(do: str, **fields: Any) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(lane, "ask", gone)
    assert OwnEngineInputs(lane).of(job(), wait=True).calls == ()
    assert OwnEngineInputs(Lane((4,))).of(job("gemm_n9_k9_f32"), wait=True).calls == ()


@pytest.mark.parametrize("fails", ["tokenize", "add", "run", "slots_captured"])
def test_where_a_request_fails_no_capture_stays_armed_and_no_request_stays(fails: str) -> None:
    lane = Lane((4,), refused=(fails,))
    assert OwnEngineInputs(lane).of(job(), wait=True).calls == ()
    assert lane.captures
    assert (lane.armed, lane.running, lane.warm) == (False, False, True)
    lane.refused = ()
    assert OwnEngineInputs(lane).of(job(), wait=True).calls


@pytest.mark.parametrize("fails", ["finish", "slots_capture_stop"])
def test_an_engine_that_does_not_take_a_capture_back_is_ended(fails: str) -> None:
    lane = Lane((4,), refused=("add", fails))
    assert OwnEngineInputs(lane).of(job(), wait=True).calls == ()
    assert (lane.armed, lane.warm) == (False, False)
