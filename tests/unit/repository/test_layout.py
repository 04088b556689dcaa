"""What holds the house together: one namespace, services that never meet in code, files that name no machine."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SERVICES = ("gateway", "router", "compiler", "evaluator", "worker")


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def service_files(service: str) -> list[Path]:
    files = sorted((ROOT / "services" / service).rglob("*.py"))
    assert files, f"no code of {service} found: this test would check nothing"
    return files


def test_no_package_file_breaks_the_namespace() -> None:
    assert list(ROOT.glob("libs/polymorph/__init__.py")) == []
    assert list(ROOT.glob("services/*/polymorph/__init__.py")) == []


def test_services_never_import_each_other() -> None:
    for service in SERVICES:
        others = tuple(f"polymorph.{other}" for other in SERVICES if other != service)
        for file in service_files(service):
            bad = [name for name in imports(file) if name.startswith(others)]
            assert not bad, f"{file} imports {bad}: services meet in libs and on the bus"


def test_every_service_has_the_same_anatomy() -> None:
    for service in SERVICES:
        folder = ROOT / "services" / service / "polymorph" / service
        missing = [
            n
            for n in ("__main__.py", "settings.py", "app.py", "domain", "adapters")
            if not (folder / n).exists()
        ]
        assert not missing, f"{service} lacks {missing}"


def test_nothing_in_the_product_unpickles() -> None:
    files = [*ROOT.glob("libs/**/*.py"), *ROOT.glob("services/**/*.py")]
    assert files
    for file in files:
        bad = [
            name
            for name in imports(file)
            if name.split(".")[0] in {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
        ]
        assert not bad, f"{file} imports {bad}"


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_locks_pin_by_name_version_and_hash_and_name_no_host() -> None:
    for lock in ("cpu.lock", "torch-cpu.lock", "triton.lock"):
        text = (ROOT / "requirements" / lock).read_text()
        assert "://" not in text
        pins = re.findall(r"^([a-zA-Z0-9._-]+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
        assert len(pins) == len(re.findall(r"^[a-zA-Z0-9]", text, re.MULTILINE))
        assert pins
