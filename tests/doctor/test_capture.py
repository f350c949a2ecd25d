"""A captured machine holds what was read and nothing about who owns it, and is diagnosed elsewhere as it was here; what
is made to be given away (``--json``, ``--markdown``) holds no names and secrets, and is not spoilt by that."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.doctor import command
from hf_rocm_tune.doctor.command import PrivateNames, of_policy, pack, read_capture, write_capture
from hf_rocm_tune.doctor.diagnose import all_checks, diagnose
from hf_rocm_tune.doctor.findings import Evidence, all_rows, own_environ
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.survey import record
from hf_rocm_tune.machine.sysfs import RecordedTree
from hf_rocm_tune.machine.variables import POLICY
from tests.machine.trees import NODES, RAPHAEL, XT, Built, Slot
from tests.machines.case import stack

OWNER = PrivateNames(
    users=("marguerite", "mag"), hosts=("thunderbird.example.org", "thunderbird"), homes=("/srv/mag-home",)
)
TOKEN = "hf_abcdefghijklmnopqrstuvwx"
# What must not be in a file or a report that is given away, and where it stands in what is read.
IN_REPORT = ("marguerite", "thunderbird", "mag-home", TOKEN, "s3cr3t-p4ss", "192.168.17.23", "9c:6b:00:12:34:56")
SECRETS = (
    *IN_REPORT,
    *("Marguerite", "18446744073709551557", "4cb2f3a0-1111-2222-3333-444455556666", "8a1c4ed1b6c33101", "a" * 64),
    *("sync_to_marguerites_nas", "printeradmins", "HF_TOKEN", "WANDB", '"USER"', "HOSTNAME"),
)
ENVIRON = {
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": "s3cr3t-p4ss",
    "USER": "marguerite",
    "HOSTNAME": "thunderbird",
    "HIP_VISIBLE_DEVICES": "0",
    "ROCR_VISIBLE_DEVICES": "GPU-8a1c4ed1b6c33101",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:8,x:marguerite",
    "MIOPEN_USER_DB_PATH": "/tmp/marguerite/miopen",
    "MIOPEN_CUSTOM_CACHE_DIR": "/srv/mag-home/miopen (/home/marguerite)",
    "RCCL_SOCKET_IFNAME": "192.168.17.23,eth0,thunderbird",
    "HCCL_TOKEN": f"token=s3cr3t-p4ss {TOKEN} https://marguerite:s3cr3t-p4ss@example.org",
}
BROKEN = {
    "devices": {"reason": f"ImportError: /home/marguerite/venv/lib/libc10.so: {TOKEN}"},
    "bitsandbytes_libraries": {"reason": "/srv/mag-home/bitsandbytes: Permission denied"},
}
# Of each section, what has another form than it should.
FORMLESS: dict[str, tuple[Any, ...]] = {
    "process": ({"groups": "all"}, {"groups": [None]}, {"shm_bytes": True}, {"release": 6}, [1]),
    "names": ({"a": "b"}, {"a": [1]}),
    "errors": ({"a": 13},),
    "nodes": ({"a": True}, {"a": {"usable": "yes"}}),
    "binary": ({"a": "\u00e4"},),
}


def owned() -> dict[str, Any]:
    """A machine whose files hold everything that a capture must not."""
    built = Built("marguerite's machine at 9c:6b:00:12:34:56").kernel("6.14.0-thunderbird")
    built.card(XT).card(slot=Slot(width=4)).igpu(RAPHAEL)
    built.files["proc/cmdline"] = (
        "BOOT_IMAGE=/vmlinuz root=UUID=4cb2f3a0-1111-2222-3333-444455556666 ip=192.168.17.23 "
        "rd.luks.name=marguerite systemd.hostname=thunderbird netdev.mac=9c:6b:00:12:34:56 "
        "amdgpu.ppfeaturemask=0xffff7fff iommu=pt\n"
    )
    built.files["proc/self/status"] = "Name:\tmarguerite-job\nUid:\t1000\nSeccomp:\t0\n"
    group = f"/user.slice/user-1000.slice/user@1000.service/sync_to_marguerites_nas.scope/docker-{'a' * 64}.scope"
    built.files["proc/self/cgroup"] = f"0::{group}\n"
    built.files["sys/fs/cgroup/memory.max"] = "17179869184\n"
    for node in (1, 2):
        built.files[f"{NODES}/{node}/properties"] += "unique_id 18446744073709551557\n"
    built.process |= {"groups": ["marguerite", "render", "printeradmins"], "cpu": "AMD Ryzen 7 7800X3D"}
    built.nodes["dev/dri/renderD128"]["group"] = "marguerite"
    built.nodes["dev/kfd"] |= {"group": "marguerite", "usable": False}
    return built.recording()


def saved(file: Path, packed: dict[str, Any]) -> Path:
    file.write_text(json.dumps(packed), encoding="utf-8")
    return file


def evidence_of(recording: dict[str, Any], environ: dict[str, str]) -> tuple[Evidence, dict[str, Any]]:
    machine, recorded = record(RecordedTree(recording))
    return Evidence(machine=machine, software=Software.from_dict(stack() | BROKEN), environ=environ), recorded


def test_planted_names_secrets_and_numbers_are_not_in_the_file() -> None:
    text = json.dumps(pack(*evidence_of(owned(), ENVIRON), OWNER))
    assert not [secret for secret in SECRETS if secret in text]


def test_what_is_hidden_changes_nothing_that_is_diagnosed(tmp_path: Path) -> None:
    environ = of_policy(ENVIRON) | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    evidence, recorded = evidence_of(owned(), environ)
    there, source = read_capture(saved(tmp_path / "machine.json", pack(evidence, recorded, OWNER)))
    assert "doctor --capture" in source
    here = diagnose(Evidence(**(vars(evidence) | {"recorded": True})), all_checks())
    assert [(one.row, one.status, one.subject) for one in here.findings] == [
        (one.row, one.status, one.subject) for one in diagnose(there, all_checks()).findings
    ]
    assert there.machine.topology == evidence.machine.topology
    assert there.machine.host.memory_limit_bytes == evidence.machine.host.memory_limit_bytes
    assert there.machine.gpus == evidence.machine.gpus


def test_only_variables_of_the_policy_are_taken_and_the_users_are_told_from_ours() -> None:
    kept = of_policy({**ENVIRON, "HSA_OVERRIDE_GFX_VERSION_1": "11.0.0", "NCCL_THING": "x"})
    others = {"HF_TOKEN", "WANDB_API_KEY", "USER", "HOSTNAME"}
    assert kept.keys() == ENVIRON.keys() - others | {"HSA_OVERRIDE_GFX_VERSION_1"}
    environ = {
        "HIP_VISIBLE_DEVICES": "0",
        "HF_ROCM_TUNE_VISIBLE_SET": "HIP_VISIBLE_DEVICES=0",
        "HF_ROCM_TUNE_SET": "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1",
        "HSA_ENABLE_SDMA": "0",
    }
    assert own_environ(environ) == {"HSA_ENABLE_SDMA": "0"}
    assert own_environ(environ | {"HIP_VISIBLE_DEVICES": "1"})["HIP_VISIBLE_DEVICES"] == "1"


def test_the_names_of_this_machine_are_found_and_public_ones_left_alone() -> None:
    found = PrivateNames.of_this_machine(
        {"USER": "render", "LOGNAME": "marguerite", "HOSTNAME": "thunderbird.lan", "HOME": "/srv/mag-home"}
    )
    assert "render" not in found.users
    assert {"marguerite", "mag-home"} <= set(found.users)
    assert {"thunderbird.lan", "thunderbird"} <= set(found.hosts)
    assert "/srv/mag-home" in found.homes
    assert (
        PrivateNames.of_this_machine({"USER": "ab", "LOGNAME": "12345"}).users == PrivateNames.of_this_machine({}).users
    )


def test_what_says_nothing_about_anybody_stays_as_it_is() -> None:
    """Forms that files have, and all that the doctor itself says."""
    forms = (
        *("0x000000f800000000 0x000000ffffffffff 0x000000000014220c", "libbitsandbytes_rocm72.so", "7.2.26015"),
        *("../../../devices/pci0000:00/0000:00:01.1/0000:01:00.0", "AMD Ryzen 7 7800X3D 8-Core Processor"),
        *("expandable_segments:True,max_split_size_mb:128", "gfx_target_version 110000\nlocation_id 768\n"),
        *("6.14.0-37-generic", "CONFIG_HSA_AMD_P2P=y"),
    )
    assert [text for text in forms if not OWNER.out_of(text) == text == OWNER.out_of_variable(text)] == []
    nobody = PrivateNames(users=(), hosts=(), homes=())
    words = [text for row in all_rows().values() for text in (row.title, row.says, row.cure, *row.sources)]
    words += [text for row in POLICY for text in (row.reason, row.cure, row.source)]
    assert [text for text in words if nobody.out_of(text) != text] == []


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sits at this machine."""
    for name, value in (("USER", "marguerite"), ("HOSTNAME", "thunderbird.example.org"), ("HOME", "/srv/mag-home")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "120")


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    cli.main(["doctor", *argv])
    return capsys.readouterr().out


@pytest.mark.usefixtures("owner")
def test_a_report_to_be_given_away_names_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = owned() | {"software": stack() | BROKEN, "environ": of_policy(ENVIRON)}
    machine = str(saved(tmp_path / "machine.json", recording))
    table = printed(capsys, "--from", machine)
    assert [word for word in IN_REPORT if word not in table] == [], "who sits here sees what was read"
    for form in ("--json", "--markdown"):
        report = printed(capsys, "--from", machine, form)
        assert [word for word in (*IN_REPORT, "8a1c4ed1") if word in report.lower()] == [], form
        # What is of use is still there.
        kept = ("/tmp/user/miopen", "/home/user/venv/lib/libc10.so", "6.14.0-host", "max_split_size_mb:8", "7900 XT")
        assert [word for word in kept if word not in report.replace("\\", "")] == [], form


@pytest.mark.usefixtures("owner", "asked_before")
def test_so_it_is_with_the_machine_that_is_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in of_policy(ENVIRON).items():
        # What needs a word would be all that is shown; the others are evidence that none does.
        if "VISIBLE" not in name and "ALLOC" not in name:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_ROCM_TUNE_DOCTOR_FAULT", "check=gemm,kind=wrong,where=marguerite")
    for form in ("--json", "--markdown"):
        report = printed(capsys, "--only", "variables", "host", form)
        assert "MIOPEN" in report
        assert [word for word in IN_REPORT if word in report.lower()] == [], form


def test_binary_files_that_no_check_reads_are_left_out() -> None:
    recording = owned()
    place = f"{NODES}/1/name"
    del recording["files"][place]
    recording["binary"][place] = base64.b64encode(b"\xff\0marguerite").decode()
    packed = pack(*evidence_of(recording, {}), OWNER)
    assert b"marguerite" not in base64.b64decode(packed["binary"][place])
    assert any(path.endswith("gpu_metrics") for path in packed["binary"])


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    evidence, recorded = evidence_of(owned(), {})
    assert write_capture(tmp_path / "a.json", evidence, recorded) > 100
    assert read_capture(tmp_path / "a.json")[0].cards == evidence.cards
    with pytest.raises(UsageError, match="cannot be written"):
        write_capture(tmp_path / "no" / "a.json", evidence, recorded)
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("make", [lambda file: file.symlink_to("mine"), os.mkfifo], ids=["link", "pipe"])
def test_what_is_no_plain_file_is_not_replaced(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "a.json")
    before = (tmp_path / "a.json").lstat()
    with pytest.raises(UsageError, match=r"a\.json is a link or not a plain file"):
        write_capture(tmp_path / "a.json", *evidence_of(owned(), {}))
    assert (tmp_path / "a.json").lstat() == before


def damaged() -> dict[str, bytes]:
    """Files that are no captured machine."""
    whole = json.dumps(Built("a machine").card().having(software=stack()).recording())
    parsed = json.loads(whole)
    return {
        "empty": b"",
        "text": b"hello",
        "binary": b"\x00\xff\xfe\x80",
        "half": whole[: len(whole) // 2].encode(),
        "list": b"[1, 2]",
        "null": b"null",
        "number": b"3",
        "no schema": b"{}",
        "other schema": b'{"schema": 2}',
        "nested": b"[" * 200_000,
        "big number": b'{"schema": 1' + b"0" * 5000 + b"}",
        "not a number": b'{"schema": NaN}',
        "files": json.dumps(parsed | {"files": [1]}).encode(),
        "file": json.dumps(parsed | {"files": {"proc/cmdline": 3}}).encode(),
        "base64": json.dumps(parsed | {"binary": {"x": "%%%"}}).encode(),
        "environ": json.dumps(parsed | {"environ": {"A": 1}}).encode(),
        "environ list": json.dumps(parsed | {"environ": ["A"]}).encode(),
        "software": json.dumps(parsed | {"software": {"python": 3}}).encode(),
        "software text": json.dumps(parsed | {"software": "much"}).encode(),
        "devices": json.dumps(parsed | {"software": stack() | {"devices": {"value": [{"index": -1}]}}}).encode(),
        **{
            f"{section} {value}": json.dumps(parsed | {section: value}).encode()
            for section, values in FORMLESS.items()
            for value in values
        },
    }


@pytest.mark.parametrize("name", damaged())
def test_a_damaged_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(damaged()[name])
    with pytest.raises(UsageError) as refused:
        read_capture(file)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_what_is_missing_in_a_file_is_unknown_and_no_error(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text('{"schema": 1}', encoding="utf-8")
    evidence, source = read_capture(file)
    done = diagnose(evidence, all_checks())
    assert "without a source" in source
    assert done.exit_code == 0
    assert {one.status for one in done.findings} <= {"unknown", "skipped", "ok"}


def test_a_missing_a_large_and_a_forbidden_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_capture(tmp_path / "nowhere.json")
    with pytest.raises(UsageError, match="directory"):
        read_capture(tmp_path)
    monkeypatch.setattr(command, "MAX_BYTES", 10)
    (tmp_path / "large").write_text(" " * 11)
    with pytest.raises(UsageError, match="larger"):
        read_capture(tmp_path / "large")
