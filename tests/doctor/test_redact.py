"""What is made to be given away (``--json``, ``--markdown``) holds no names and secrets, and is not spoilt by that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.doctor.command import Owner, pack, read_capture
from hf_rocm_tune.doctor.diagnose import all_checks, diagnose
from hf_rocm_tune.doctor.findings import all_rows
from hf_rocm_tune.machine.survey import record
from hf_rocm_tune.machine.sysfs import RecordedTree
from hf_rocm_tune.machine.variables import POLICY
from tests.machine.parts import RAPHAEL, XT, Slot
from tests.machine.trees import Built
from tests.machines.installs import stack

FORMS = ("--json", "--markdown")
TOKEN = "hf_abcdefghijklmnopqrstuvwx"
# What stands in a machine below, and must not stand in a report of it.
PLANTED = (
    "marguerite",
    "thunderbird",
    "mag-home",
    TOKEN,
    "s3cr3t-p4ss",
    "192.168.17.23",
    "9c:6b:00:12:34:56",
    "8a1c4ed1",
)
ENVIRON = {
    "MIOPEN_USER_DB_PATH": "/tmp/marguerite/miopen",
    "MIOPEN_CUSTOM_CACHE_DIR": "/srv/mag-home/miopen (/home/marguerite)",
    "ROCR_VISIBLE_DEVICES": "GPU-8a1c4ed1b6c33101",
    "RCCL_SOCKET_IFNAME": "192.168.17.23,thunderbird",
    "HCCL_TOKEN": f"token=s3cr3t-p4ss {TOKEN} https://marguerite:s3cr3t-p4ss@example.org",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:8,x:marguerite",
}
BROKEN = {
    "devices": {"reason": f"ImportError: /home/marguerite/venv/lib/libc10.so: {TOKEN}"},
    "bitsandbytes_libraries": {"reason": "/srv/mag-home/bitsandbytes: Permission denied"},
}


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sits at this machine."""
    for name, value in (("USER", "marguerite"), ("HOSTNAME", "thunderbird.example.org"), ("HOME", "/srv/mag-home")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "120")


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    cli.main(["doctor", *argv])
    return capsys.readouterr().out


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine that names its owner wherever it can."""
    built = Built("marguerite's machine at 9c:6b:00:12:34:56").kernel("6.14.0-thunderbird").card(XT)
    built.nodes["dev/kfd"] |= {"group": "marguerite", "usable": False}
    recording = built.having(software=stack() | BROKEN, environ=ENVIRON).recording()
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(recording), encoding="utf-8")
    return file


@pytest.mark.usefixtures("owner")
def test_a_report_to_be_given_away_names_nobody(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = printed(capsys, "--from", str(machine))
    assert [word for word in PLANTED if word not in table] == [], "it is in what was read, and who sits here sees it"
    for form in FORMS:
        report = printed(capsys, "--from", str(machine), form)
        assert [word for word in PLANTED if word in report.lower()] == [], form
        # What is of use is still there.
        kept = (
            "/tmp/user/miopen",
            "/home/user/venv/lib/libc10.so",
            "6.14.0-host",
            "max_split_size_mb:8",
            "Radeon RX 7900 XT",
        )
        assert [word for word in kept if word not in report.replace("\\", "")] == [], form


@pytest.mark.usefixtures("owner", "asked_before")
def test_so_it_is_with_the_machine_that_is_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRON.items():
        # What needs a word would be all that is shown; the others are evidence that none does.
        if "VISIBLE" not in name and "ALLOC" not in name:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_ROCM_TUNE_DOCTOR_FAULT", "check=gemm,kind=wrong,where=marguerite")
    for form in FORMS:
        report = printed(capsys, "--only", "variables", "host", form)
        assert "MIOPEN" in report
        assert [word for word in PLANTED if word in report.lower()] == [], form


def test_what_the_doctor_itself_says_is_not_taken_for_a_name() -> None:
    nobody = Owner(users=(), hosts=(), homes=())
    words = [text for row in all_rows().values() for text in (row.title, row.says, row.cure, *row.sources)]
    words += [text for row in POLICY for text in (row.reason, row.cure, row.source)]
    assert [text for text in words if nobody.out_of(text) != text] == []


@pytest.mark.parametrize("name", ["torch", "Radeon", "version", "value", "files", "names", "transfers", "gfx1100"])
def test_a_name_that_is_a_word_of_the_doctor_spoils_no_capture(name: str, tmp_path: Path) -> None:
    machine = Built("a machine").card(XT).card(slot=Slot(width=4)).igpu(RAPHAEL)
    recording = machine.having(software=stack(), environ={"HIP_VISIBLE_DEVICES": "0"}).recording()
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(recording), encoding="utf-8")
    evidence, _ = read_capture(file)
    named = Owner.of_this_machine({"USER": name, "HOSTNAME": f"{name}.lan", "HOME": f"/home/{name}"})
    packed = pack(evidence, record(RecordedTree(recording))[1], named)
    file.write_text(json.dumps(packed), encoding="utf-8")
    again, _ = read_capture(file)
    assert diagnose(again, all_checks()).findings == diagnose(evidence, all_checks()).findings
    assert named.out_of(f"/home/{name}/x") == "/home/user/x"
