"""The process that judges a kernel in a worker: what it may still reach, and that less isolation loads nothing."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polymorph.engine.loading import testing
from polymorph.engine.loading.admission import Refused
from polymorph.engine.selftest_case import SelfTest
from polymorph.kernels.schema import Solution
from polymorph.sandbox import isolation
from polymorph.sandbox.isolation import Isolation
from polymorph.sandbox.sealed import sealed

PROBE = """
import json, os, socket, sys
from polymorph.engine import selftest
from polymorph.engine.selftest_case import SelfTest
from polymorph.sandbox import landlock

def fails(what, *arguments):
    try:
        what(*arguments)
    except OSError:
        return True
    return False

def connects():
    with socket.create_connection(("127.0.0.1", int(sys.argv[3])), 1):
        pass

test = SelfTest.of(json.loads(sys.argv[1]))
landlock.restrict(selftest._doors(test))
import polymorph.engine.selftest_judge
call, secret = test.calls[0], sys.argv[2]
shut = {
    "a secret beside the inputs": fails(open, secret),
    "the password file": fails(open, "/etc/passwd"),
    "the inputs, to write": fails(open, call, "ab"),
    "the folder of the inputs": fails(os.listdir, os.path.dirname(call)),
    "the temporary folder": fails(open, "/tmp/polymorph-probe", "w"),
    "the network": fails(connects),
    "who started it": fails(open, f"/proc/{os.getppid()}/environ"),
}
opened = {
    "the inputs": not fails(open, call, "rb"),
    "the scratch folder": not fails(open, os.path.join(test.scratch, "x"), "w"),
}
print(json.dumps({"shut": shut, "opened": opened}))
"""


def _test(folder: Path, library: int = 0) -> SelfTest:
    (folder / "private").mkdir()
    save_file({"x": torch.ones(1, 64)}, folder / "call.safetensors")
    save_file({"weight": torch.ones(272, 64)}, folder / "weight.safetensors")
    return SelfTest(
        definition="gemm_n272_k64_f32",
        numerics="reordered",
        calls=(str(folder / "call.safetensors"),),
        weight=str(folder / "weight.safetensors"),
        rows=(1, 5),
        library=library,
        host="/nonexistent",
        scratch=str(folder / "private"),
        level=int(isolation.detect()),
    )


@pytest.mark.parametrize("level", [Isolation.FILTERED, Isolation.NAMESPACED])
def test_the_judge_reaches_what_it_needs_and_nothing_else(tmp_path: Path, level: Isolation) -> None:
    if isolation.detect() < level:
        pytest.skip(f"this host is not {level.name.lower()}")
    secret = tmp_path / "promoter.key"
    secret.write_text("secret")
    with asyncio.Runner() as runner:
        server = runner.run(asyncio.start_server(lambda *_: None, "127.0.0.1", 0))
        port = server.sockets[0].getsockname()[1]
        test = _test(tmp_path)
        command = [sys.executable, "-P", "-c", PROBE, json.dumps(test.document()), str(secret), str(port)]
        done = subprocess.run(
            [*isolation.prefix(level), *command], cwd=test.scratch,
            env=testing._environment(test.scratch), capture_output=True, text=True, check=False,
        )  # fmt: skip
        server.close()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [name for name, is_shut in found["shut"].items() if not is_shut] == []
    assert [name for name, is_open in found["opened"].items() if not is_open] == []


async def test_a_kernel_is_tested_in_the_sandbox_from_end_to_end(gates, tmp_path: Path) -> None:
    solution: Solution = gates.solution()
    content = gates.library(solution)
    crash = gates.library(gates.solution(hook="c.y[0] = c.x[-1100];"))
    for index, (library, reason) in enumerate(((content, ""), (crash, "not its own"))):
        folder = tmp_path / str(index)
        folder.mkdir()
        descriptor = sealed("kernel", library)
        test = SelfTest(**{**vars(_test(folder, descriptor)), "host": await testing.host()})
        try:
            if reason:
                with pytest.raises(Refused, match=f"self-test: .*{reason}"):
                    await testing.check(test)
            else:
                await testing.check(test)
        finally:
            os.close(descriptor)


async def test_an_answer_that_never_ends_is_cut(monkeypatch, tmp_path: Path) -> None:
    """Whatever a process writes, no more of it is kept than an answer has."""
    chatty = tmp_path / "python"
    chatty.write_text("#!/bin/sh\nhead -c 50000000 /dev/zero\n")
    chatty.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(chatty))
    test = _test(tmp_path)
    with pytest.raises(Refused, match="gave no verdict"):
        await testing.check(test)
