import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parents[3] / "models"


@pytest.fixture(scope="session", autouse=True)
def scripts_importable() -> Iterator[None]:
    """models/ holds programs, not a package: they find each other when their folder is on the path."""
    sys.path.insert(0, str(MODELS))
    yield
    sys.path.remove(str(MODELS))


@pytest.fixture
def models_folder() -> Path:
    return MODELS
