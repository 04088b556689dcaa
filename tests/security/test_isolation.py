"""The sandbox itself: what it refuses, and that less isolation than demanded stops the evaluator."""

import os
import signal

import pytest

from polymorph.evaluator.adapters.sandbox.lane import Lane, SandboxBroken
from polymorph.evaluator.settings import EvaluatorSettings
from polymorph.sandbox import isolation, limits
from polymorph.sandbox.isolation import Isolation, IsolationTooWeak


def test_a_host_that_isolates_less_than_demanded_evaluates_nothing(monkeypatch) -> None:
    monkeypatch.setattr(isolation, "detect", lambda: Isolation.PROCESS)
    with pytest.raises(IsolationTooWeak, match="at least filtered is demanded"):
        isolation.require(Isolation.FILTERED)


def test_the_level_of_this_host_is_told_in_words() -> None:
    assert isolation.describe(Isolation.PROCESS) == "process: rlimits"
    assert "seccomp" in isolation.describe(Isolation.NAMESPACED)


def test_an_unknown_level_is_refused_by_the_settings() -> None:
    with pytest.raises(ValueError, match="one of process, filtered, namespaced"):
        EvaluatorSettings(min_isolation="none").isolation()


def test_the_compiler_writes_nowhere_but_its_folder(gates, tmp_path) -> None:
    target = tmp_path / "outside"
    done = gates.builder.runner(["/bin/sh", "-c", f"echo x > {target}"], gates.builder.folder)
    assert done.returncode != 0
    assert not target.exists()


def test_the_compiler_reaches_no_network_and_no_secret(gates) -> None:
    done = gates.builder.runner(["/bin/sh", "-c", "cat /etc/passwd; env"], gates.builder.folder)
    assert "root:" not in done.stdout
    assert "POLYMORPH" not in done.stdout


def test_the_compiler_may_start_few_processes(gates) -> None:
    done = gates.builder.runner(["/bin/bash", "-c", "ulimit -u"], gates.builder.folder)
    assert int(done.stdout) <= limits.processes_now() + 300


def test_a_zygote_that_died_is_started_anew(gates) -> None:
    with Lane(gates.lane.machine) as lane:
        os.kill(lane._zygote.pid, signal.SIGKILL)
        with lane.process({}) as process:
            assert process.ask("peaks", kind="arithmetic", rounds=1, threads=1)["ok"]
        assert lane.ready


def test_a_zygote_that_cannot_be_started_anew_makes_the_lane_not_ready(gates, monkeypatch) -> None:
    with Lane(gates.lane.machine) as lane:
        os.kill(lane._zygote.pid, signal.SIGKILL)
        monkeypatch.setattr("sys.executable", "/bin/false")
        with pytest.raises(SandboxBroken), lane.process({}):
            pass
        assert not lane.ready
        monkeypatch.undo()
        with lane.process({}):
            assert lane.ready
    with pytest.raises(SandboxBroken, match="not started"), lane.process({}):
        pass
