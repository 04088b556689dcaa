import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polymorph.embedded.cli import main
from polymorph.embedded.folder import DataFolder, StartRefused, free_port
from polymorph.embedded.options import UpOptions


def test_one_supervisor_holds_a_folder(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    folder.make()
    with folder.lock():
        assert folder.locked()
        with pytest.raises(StartRefused, match="polymorph down"), folder.lock():
            pass
    assert not folder.locked()


def test_ports_stay_from_start_to_start_unless_taken(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    first = folder.ports(["nats", "valkey"])
    assert folder.ports(["nats", "valkey"]) == first
    with socket.socket() as held:
        held.bind(("127.0.0.1", first["nats"]))
        held.listen()
        second = folder.ports(["nats", "valkey"])
    assert second["nats"] != first["nats"]
    assert second["valkey"] == first["valkey"]


def test_a_half_written_state_file_reads_as_none(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.make()
    folder.state_file.write_text('{"pid": 1')
    assert folder.read_state() is None


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartRefused, match="--data DIR"):
        DataFolder(tmp_path / "file" / "data").make()


class TestRefusedStarts:
    """Exit code 2 and one line on stderr; nothing is started."""

    def refuse(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> str:
        assert main(["up", "--port", str(free_port()), "--data", str(tmp_path / "data"), *arguments]) == 2
        line = capsys.readouterr().err.strip()
        assert "\n" not in line
        assert not (tmp_path / "data").exists(), "a refused start makes no folder"
        return line

    def test_a_model_folder_that_is_none(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert "config.json" in self.refuse(capsys, tmp_path, "--model", str(tmp_path))

    def test_a_taken_port(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            held.listen()
            port = held.getsockname()[1]
            assert f"port {port} is taken" in self.refuse(capsys, tmp_path, "--port", str(port))

    def test_no_workers(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert "--workers 0" in self.refuse(capsys, tmp_path, "--workers", "0")

    @pytest.mark.parametrize("option", [("--kv-gib", "0"), ("--kv-gib", "-500"), ("--max-model-len", "3")])
    def test_what_a_worker_would_refuse_again_and_again(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, option: tuple[str, str]
    ) -> None:
        told = self.refuse(capsys, tmp_path, *option)
        assert " ".join(option) in told
        assert "at least" in told

    def test_an_unknown_mode(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert "observe, recommend, canary or pinned" in self.refuse(capsys, tmp_path, "--mode", "fast")


def test_a_folder_in_use_is_told_with_the_commands_that_mean_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = DataFolder(tmp_path / "my data")
    folder.make()
    with folder.lock():
        assert main(["up", "--data", str(folder.root), "--model", "none"]) == 2
    line = capsys.readouterr().err
    assert f"`polymorph status --data '{folder.root}'`" in line
    assert f"`polymorph down --data '{folder.root}'`" in line
    assert DataFolder(Path(".polymorph")).option == ""


def test_a_file_as_data_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    model = Path(__file__).resolve().parents[3] / "models/tiny-dense"
    arguments = ["--port", str(free_port()), "--model", str(model), "--data", str(tmp_path / "data")]
    assert main(["up", *arguments]) == 2
    assert "is a file" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("polymorph 0.")


def test_status_and_down_where_nothing_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["status", "--data", str(tmp_path)]) == 3
    assert f"polymorph up --data {tmp_path}" in capsys.readouterr().out
    assert main(["down", "--data", str(tmp_path)]) == 0


def test_memory_counts_every_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["X"], "dtype": "bfloat16"}')
    (model / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("polymorph.embedded.options.cpu_flags", lambda: {"avx2", "fma"})
    options = UpOptions(model=model, workers=10_000, port=free_port())
    with pytest.raises(StartRefused, match=r"memory: .* GiB available; wanted: 2"):
        options.check()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def left_behind(tmp_path: Path, pid: int) -> DataFolder:
    """What a supervisor leaves that was killed."""
    folder = DataFolder(tmp_path / "data")
    folder.make()
    folder.write_state({"pid": pid, "url": "u", "model": "m", "mode": "observe", "children": {}})
    return folder


def test_a_start_forgets_who_ran_before(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    folder = left_behind(tmp_path, stranger.pid)
    with folder.lock():
        assert main(["status", "--data", str(folder.root)]) == 1
        assert main(["down", "--data", str(folder.root)]) == 1
    assert capsys.readouterr().out.count("a start is under way") == 2
    assert stranger.poll() is None


def test_down_ends_no_stranger(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    folder = left_behind(tmp_path, 0)
    with folder.lock():
        left_behind(tmp_path, stranger.pid)
        assert main(["down", "--data", str(folder.root)]) == 1
        assert stranger.poll() is None
        assert "is not its supervisor" in capsys.readouterr().out
        stranger.kill()
        stranger.wait()
        assert main(["down", "--data", str(folder.root)]) == 1
        assert "is gone" in capsys.readouterr().out


def test_who_holds_a_folder_is_known(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, 0)
    with folder.lock():
        assert folder.held_by(os.getpid())
    assert not folder.held_by(os.getpid())
