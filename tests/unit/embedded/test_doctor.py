import json
import socket
from pathlib import Path

import pytest

from polymorph.embedded import doctor


def test_a_taken_port_is_named_with_the_way_out() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        finding = doctor.check_port(held.getsockname()[1])
    assert finding.level == "fail"
    assert "taken" in finding.found
    assert "--port" in finding.wanted


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    assert doctor.check_port(port).level == "fail"


def test_without_a_compiler_the_package_is_named(tmp_path: Path) -> None:
    finding = doctor.check_compiler({"PATH": str(tmp_path)})
    assert finding.level == "fail"
    assert "g++" in finding.wanted


def test_a_compiler_that_cannot_build_is_found_out(tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    broken.chmod(0o755)
    finding = doctor.check_compiler({"PATH": str(tmp_path)})
    assert finding.level == "fail"
    assert "no headers" in finding.found


def test_too_little_memory_says_how_much_would_do() -> None:
    finding = doctor.check_memory(6.0, available_gib=2.0)
    assert (finding.level, finding.found) == ("fail", "2.0 GiB available")
    assert "6.0 GiB" in finding.wanted


@pytest.mark.parametrize(
    ("flags", "level"),
    [({"avx2", "fma"}, "ok"), ({"avx512f", "avx512_bf16"}, "ok"), ({"sse4_2"}, "fail")],
)
def test_the_isa_decides(flags: set[str], level: str) -> None:
    assert doctor.check_isa(flags).level == level


def test_full_disk_names_the_place(tmp_path: Path) -> None:
    finding = doctor.check_disk(tmp_path / "not" / "there", needed_gib=1e9)
    assert finding.level == "fail"
    assert str(tmp_path) in finding.found


class TestModelFolder:
    def test_no_config(self, tmp_path: Path) -> None:
        assert "config.json" in doctor.check_model(tmp_path).found

    def test_config_that_is_no_json(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        assert "not JSON" in doctor.check_model(tmp_path).found

    def test_config_without_architecture(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert doctor.check_model(tmp_path).level == "fail"

    def test_config_that_is_a_list(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("[]")
        assert doctor.check_model(tmp_path).level == "fail"

    def test_no_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        assert "safetensors" in doctor.check_model(tmp_path).found


def test_the_report_exits_2_where_one_check_fails(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [doctor.Finding("a", "ok", "fine"), doctor.Finding("b", "fail", "bad", "good")]
    assert doctor.report(findings, as_json=False) == 2
    assert "bad  ->  good" in capsys.readouterr().out
    assert doctor.report(findings[:1], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)[0]["check"] == "a"


def test_it_needs_nothing_but_the_standard_library() -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            doctor.__file__,
            "--json",
            "--skip",
            "port",
            "--skip",
            "memory",
            "--skip",
            "disk",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {finding["check"] for finding in json.loads(done.stdout)} >= {
        "system",
        "python",
        "compiler",
        "isa",
    }
