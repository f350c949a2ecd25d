"""What tests of the doctor on this machine share."""

from __future__ import annotations

import pytest

from hf_rocm_tune.doctor import findings
from hf_rocm_tune.machine.software import Software, read_software


@pytest.fixture(scope="session")
def software() -> Software:
    """What is installed here; torch is asked once."""
    return read_software()


@pytest.fixture
def asked_before(software: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor reads this machine, and takes the answer of torch from an earlier test."""
    monkeypatch.setattr(findings, "read_software", lambda **_: software)
