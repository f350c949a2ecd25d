from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def machines() -> ModuleType:
    """``machines.py`` beside this file, whatever the import mode."""
    spec = importlib.util.spec_from_file_location("invented_machines", Path(__file__).parent / "machines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
