"""The keys and passwords of a deployment: each service's own, kept from one run to the next, and good for a server."""

import importlib.util
import stat
import subprocess
from pathlib import Path

import pytest

from polymorph.bus.server import server_binary
from polymorph.config.settings import NatsSettings
from polymorph.kernels.signing import Role, Signer, Trust

FOLDER = Path(__file__).resolve().parents[3] / "deploy/compose"


@pytest.fixture(scope="module")
def keys():
    spec = importlib.util.spec_from_file_location("compose_keys", FOLDER / "keys.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made(keys, tmp_path):
    def make():
        keys.make(tmp_path, nats_url="nats://nats:4222", nats_store=Path("/data/jetstream"), owner=10001)
        return tmp_path

    make()
    return make


def contents(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_second_run_keeps_what_the_first_made(made, tmp_path):
    first = contents(tmp_path)
    made()
    assert contents(tmp_path) == first


def test_every_file_is_readable_by_its_owner_alone(made, tmp_path):
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "trust.json":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_each_service_gets_its_own_user_in_the_form_its_settings_read(made, tmp_path, monkeypatch):
    from polymorph.compiler.settings import CompilerSettings

    monkeypatch.setenv("POLYMORPH_CONFIG", str(tmp_path / "compiler/polymorph.yaml"))
    nats = CompilerSettings().nats
    assert isinstance(nats, NatsSettings)
    assert (nats.url, nats.user) == ("nats://nats:4222", "compiler")
    server = (tmp_path / "nats/nats.conf").read_text()
    assert nats.password.get_secret_value() in server
    assert "sync_interval: always" in server
    monkeypatch.setenv("POLYMORPH_CONFIG", str(tmp_path / "worker/polymorph.yaml"))
    assert CompilerSettings().nats.password != nats.password


def test_workers_trust_the_evaluator_and_the_promoter_and_hold_no_private_key(made, tmp_path):
    trust = Trust.load(tmp_path / "worker/trust.json")
    for folder, name, role in (
        ("compiler", "promoter.key", Role.PROMOTER),
        ("evaluator", "evaluator.key", Role.EVALUATOR),
    ):
        signer = Signer.load(tmp_path / folder / name)
        trust.verify(signer.key_id, b"word", signer.sign(b"word"), role=role)
    assert not list((tmp_path / "worker").glob("*.key"))
    assert sorted(p.name for p in tmp_path.rglob("*.key")) == ["evaluator.key", "promoter.key"]


def test_the_database_password_is_the_same_on_both_sides_and_reaches_the_url(made, tmp_path):
    from polymorph.compiler.app import database_url
    from polymorph.compiler.settings import CompilerSettings

    password = (tmp_path / "postgres/password").read_text()
    settings = CompilerSettings(
        database_url="postgresql+asyncpg://polymorph@postgres:5432/polymorph",
        database_password_file=tmp_path / "compiler/database_password",
    )
    assert database_url(settings) == f"postgresql+asyncpg://polymorph:{password}@postgres:5432/polymorph"
    assert password not in str(settings.masked())


def test_the_server_accepts_its_configuration(made, tmp_path):
    config = tmp_path / "nats/nats.conf"
    config.write_text(config.read_text().replace("/data/jetstream", str(tmp_path / "jetstream")))
    done = subprocess.run([server_binary(), "-t", "-c", config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
