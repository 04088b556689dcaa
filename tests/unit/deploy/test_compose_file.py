"""compose.yaml and the Dockerfile agree with each other, with the settings of the services, and keep the rules."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy/compose"
SERVICES = ("gateway", "router", "compiler", "evaluator", "worker")
SERVERS = ("nats", "valkey", "postgres")


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def dockerfile():
    return (FOLDER / "Dockerfile").read_text()


def stages(dockerfile):
    """Each stage with the text of it and of those it builds on."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", dockerfile, flags=re.MULTILINE)
    texts = {}
    for parent, name, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        texts[name] = texts.get(parent, "") + text
    return texts


def test_every_service_has_a_target_of_its_own_that_runs_its_module(compose, dockerfile):
    texts = stages(dockerfile)
    for name in SERVICES:
        assert compose["services"][name]["build"]["target"] == name
        assert f'CMD ["python", "-m", "polymorph.{name}"]' in texts[name]


def test_images_run_as_nobody_special_and_tell_their_health(dockerfile):
    for name in SERVICES:
        text = stages(dockerfile)[name]
        assert re.findall(r"^USER (\S+)", text, flags=re.MULTILINE)[-1] == "polymorph"
        assert "HEALTHCHECK" in text


def test_services_wait_for_what_they_need_to_be_healthy(compose):
    services = compose["services"]
    for name in SERVICES:
        needs = services[name]["depends_on"]
        assert needs["topology"]["condition"] == "service_completed_successfully"
        assert needs["nats"]["condition"] == "service_healthy"  # and so it is stopped after them
    assert services["topology"]["depends_on"]["nats"]["condition"] == "service_healthy"
    assert services["compiler"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert services["router"]["depends_on"]["valkey"]["condition"] == "service_healthy"
    for name in SERVERS:
        assert "test" in services[name]["healthcheck"]
    for name in ("nats", "postgres"):
        assert services[name]["depends_on"]["keys"]["condition"] == "service_completed_successfully"


def test_no_service_sees_the_secrets_of_another(compose):
    for name, service in compose["services"].items():
        mounted = {v.split(":")[0] for v in service.get("volumes", ()) if v.startswith("secrets-")}
        if name == "keys":
            assert len(mounted) == len([v for v in compose["volumes"] if v.startswith("secrets-")])
            assert service["network_mode"] == "none"
        else:
            assert mounted <= {"secrets-operator" if name == "topology" else f"secrets-{name}"}
            assert all(v.endswith(":ro") for v in service.get("volumes", ()) if v.startswith("secrets-"))


def test_no_password_stands_in_the_file(compose):
    for name, service in compose["services"].items():
        for key, value in (service.get("environment") or {}).items():
            secret = re.search(r"PASSWORD|SECRET|TOKEN", key)
            assert not secret or key.endswith("_FILE"), f"{name}: {key}={value}"


def test_only_the_gateway_is_reachable_from_outside_and_on_loopback_by_default(compose):
    published = {name for name, service in compose["services"].items() if service.get("ports")}
    assert published == {"gateway"}
    assert compose["services"]["gateway"]["ports"][0].startswith("${POLYMORPH_LISTEN:-127.0.0.1}:")
    assert all(compose["networks"][name]["internal"] for name in ("inner", "cache"))
    expected = {"router": ["inner", "cache"], "valkey": ["cache"]}  # Valkey asks for no password
    for name, service in compose["services"].items():
        if name == "topology":  # it reads NATS's monitoring endpoint, which listens on loopback alone
            assert service["network_mode"] == "service:nats"
        elif name not in ("gateway", "keys"):
            assert service["networks"] == expected.get(name, ["inner"]), name


def test_services_drop_every_capability_and_gain_none(compose):
    for name in SERVICES:
        service = compose["services"][name]
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert not service.get("privileged")


def settings_of(name):
    from polymorph.compiler.settings import CompilerSettings
    from polymorph.gateway.settings import GatewaySettings
    from polymorph.router.settings import RouterSettings
    from polymorph.worker.settings import WorkerSettings

    kinds = {
        "compiler": CompilerSettings,
        "gateway": GatewaySettings,
        "router": RouterSettings,
        "worker": WorkerSettings,
    }
    if name == "evaluator":
        module = pytest.importorskip("polymorph.evaluator.settings")
        kinds[name] = module.EvaluatorSettings
    return kinds[name]


@pytest.mark.parametrize("name", SERVICES)
def test_every_variable_is_a_setting_of_its_service(compose, dockerfile, name):
    prefix = f"POLYMORPH_{name.upper()}_"
    fields = settings_of(name).model_fields
    in_image = re.findall(rf"{prefix}(\w+)", stages(dockerfile)[name])
    in_file = [
        k.removeprefix(prefix) for k in compose["services"][name]["environment"] if k.startswith(prefix)
    ]
    assert in_file or in_image
    for field in (*in_image, *in_file):
        assert field.lower() in fields, f"{prefix}{field} is no setting"


@pytest.mark.parametrize("given", ["", "canary", "observe"])
def test_a_mode_that_was_given_is_set_at_every_start_and_none_changes_nothing(compose, monkeypatch, given):
    passed = compose["services"]["compiler"]["environment"]
    assert passed["POLYMORPH_COMPILER_MODE"] == "${POLYMORPH_MODE:-}"
    assert "POLYMORPH_COMPILER_DEFAULT_MODE" not in passed
    monkeypatch.setenv("POLYMORPH_COMPILER_MODE", given)
    settings = settings_of("compiler")()
    assert settings.mode == (given or None)
    assert settings.default_mode == "observe"


def test_the_evaluator_measures_as_the_worker_serves_and_asks_it_for_its_cores(compose):
    worker = compose["services"]["worker"]["environment"]
    evaluator = compose["services"]["evaluator"]["environment"]
    assert evaluator["POLYMORPH_EVALUATOR_HOST_LEASE"] == worker["POLYMORPH_WORKER_WORKER_ID"]
    assert evaluator["POLYMORPH_EVALUATOR_ENGINE_MAX_MODEL_LEN"] == worker["POLYMORPH_WORKER_MAX_MODEL_LEN"]
    assert compose["services"]["evaluator"]["depends_on"]["worker"]["condition"] == "service_healthy"


def test_what_must_outlive_a_container_lies_in_a_volume(compose, dockerfile):
    assert "WORKDIR /var/lib/polymorph" in dockerfile  # data folders are relative to it
    for name in ("worker", "evaluator"):
        assert f"{name}-data:/var/lib/polymorph" in compose["services"][name]["volumes"]
        assert f"{name}-data" in compose["volumes"]


def test_the_example_names_every_variable_with_its_default(compose):
    text = (FOLDER / "compose.yaml").read_text()
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    used.pop("POLYMORPH_TAG")
    example = dict(
        line.split("=", 1)
        for line in (FOLDER / ".env.example").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert example == used


@pytest.mark.parametrize("command", [("docker", "compose"), ("docker-compose",)])
def test_the_file_is_valid_for(command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    if subprocess.run([*command, "version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(command)} is not installed")
    done = subprocess.run(
        [*command, "-f", FOLDER / "compose.yaml", "config", "-q"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_build_context_holds_what_the_dockerfile_copies_and_no_models():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (.+) \S+$", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    for source in " ".join(copied).split():
        assert (ROOT / source).exists()
        assert any(source == k or Path(source).match(k) for k in kept), source
    assert not any(k.startswith("models") for k in kept)
