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
            "--skip",
            "model",
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


def test_a_file_is_no_data_folder(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    finding = doctor.check_disk(tmp_path / "data", needed_gib=0)
    assert finding.level == "fail"
    assert "is a file" in finding.found
    assert "--data DIR" in finding.wanted


def test_a_place_that_takes_no_files_is_told_before_its_room() -> None:
    finding = doctor.check_disk(Path("/proc/x"))
    assert (finding.level, finding.found) == ("fail", "/proc is not writable")


def test_looking_leaves_nothing_in_the_data_folder(tmp_path: Path) -> None:
    assert doctor.check_disk(tmp_path, needed_gib=0).level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_there_is_not_cannot_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--skip", "foo"])
    assert ended.value.code == 2
    assert "'foo'" in capsys.readouterr().err


class TestDefaultModel:
    def test_it_is_checked_where_none_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(doctor, "check_model", lambda folder: doctor.Finding("model", "ok", str(folder)))
        others = [option for name in doctor.CHECKS if name != "model" for option in ("--skip", name)]
        assert doctor.main(["--json", *others]) == 0
        assert json.loads(capsys.readouterr().out) == [
            {"check": "model", "level": "ok", "found": str(doctor.DEFAULT_MODEL), "wanted": ""}
        ]

    def test_where_it_is_missing_set_up_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(doctor, "DEFAULT_MODEL", tmp_path / "none")
        assert "make setup" in doctor.check_model(tmp_path / "none").wanted
        assert "make setup" not in doctor.check_model(tmp_path / "other").wanted

    def test_it_lies_in_the_checkout_whatever_the_current_folder(self) -> None:
        root = Path(__file__).resolve().parents[3]
        assert root / "models/smollm2-135m-instruct" == doctor.DEFAULT_MODEL
