"""A captured machine holds what was read and nothing about who owns it, and is diagnosed elsewhere as it was here."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.doctor import command
from hf_rocm_tune.doctor.command import Owner, of_policy, pack, read_capture, write_capture
from hf_rocm_tune.doctor.diagnose import all_checks, diagnose
from hf_rocm_tune.doctor.findings import Evidence, own_environ
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.survey import record
from hf_rocm_tune.machine.sysfs import RecordedTree
from tests.machine.parts import RAPHAEL, XT, Slot
from tests.machine.trees import NODES, Built
from tests.machines.installs import stack

OWNER = Owner(users=("marguerite", "mag"), hosts=("thunderbird.example.org", "thunderbird"), homes=("/srv/mag-home",))
# What must not be in the file, and where it stands in what is read.
SECRETS = (
    "marguerite",
    "Marguerite",
    "thunderbird",
    "/home/marguerite",
    "/srv/mag-home",
    "hf_abcdefghijklmnopqrstuvwx",
    "s3cr3t-p4ss",
    "18446744073709551557",
    "9c:6b:00:12:34:56",
    "4cb2f3a0-1111-2222-3333-444455556666",
    "8a1c4ed1b6c33101",
    "192.168.17.23",
    "a" * 64,
    "sync_to_marguerites_nas",
)


def owned() -> dict[str, Any]:
    """A machine whose files hold everything that a capture must not."""
    built = Built("planted").card(XT).card(slot=Slot(width=4)).igpu(RAPHAEL)
    built.files["proc/cmdline"] = (
        "BOOT_IMAGE=/vmlinuz root=UUID=4cb2f3a0-1111-2222-3333-444455556666 ip=192.168.17.23 "
        "rd.luks.name=marguerite systemd.hostname=thunderbird netdev.mac=9c:6b:00:12:34:56 "
        "amdgpu.ppfeaturemask=0xffff7fff iommu=pt\n"
    )
    built.files["proc/self/status"] = "Name:\tmarguerite-job\nUid:\t1000\nSeccomp:\t0\n"
    group = f"/user.slice/user-1000.slice/user@1000.service/sync_to_marguerites_nas.scope/docker-{'a' * 64}.scope"
    built.files["proc/self/cgroup"] = f"0::{group}\n"
    built.files[f"sys/fs/cgroup{group}/memory.max"] = "17179869184\n"
    for node in (1, 2):
        built.files[f"{NODES}/{node}/properties"] += "unique_id 18446744073709551557\n"
    built.process |= {"groups": ["marguerite", "render", "printeradmins"], "cpu": "AMD Ryzen 7 7800X3D"}
    built.nodes["dev/dri/renderD128"]["group"] = "marguerite"
    return built.recording()


def evidence_of(recording: dict[str, Any], environ: dict[str, str]) -> tuple[Evidence, dict[str, Any]]:
    machine, recorded = record(RecordedTree(recording))
    software = stack() | {"bitsandbytes_libraries": {"reason": "/home/marguerite/venv/bitsandbytes: Permission denied"}}
    return Evidence(machine=machine, software=Software.from_dict(software), environ=environ), recorded


ENVIRON = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx",
    "WANDB_API_KEY": "s3cr3t-p4ss",
    "USER": "marguerite",
    "HOSTNAME": "thunderbird",
    "HIP_VISIBLE_DEVICES": "0",
    "ROCR_VISIBLE_DEVICES": "GPU-8a1c4ed1b6c33101",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "MIOPEN_USER_DB_PATH": "/home/marguerite/.cache/miopen",
    "MIOPEN_CUSTOM_CACHE_DIR": "/srv/mag-home/miopen",
    "RCCL_SOCKET_IFNAME": "192.168.17.23,eth0,thunderbird",
    "HCCL_TOKEN": "token=s3cr3t-p4ss hf_abcdefghijklmnopqrstuvwx https://marguerite:s3cr3t-p4ss@example.org",
}


def test_planted_names_secrets_and_numbers_are_not_in_the_file() -> None:
    text = json.dumps(pack(*evidence_of(owned(), ENVIRON), OWNER))
    assert not [secret for secret in SECRETS if secret in text]
    assert "printeradmins" not in text
    assert not [name for name in ("HF_TOKEN", "WANDB", '"USER"', "HOSTNAME") if name in text]


def test_what_is_hidden_changes_nothing_that_is_diagnosed(tmp_path: Path) -> None:
    evidence, recorded = evidence_of(owned(), of_policy(ENVIRON))
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(pack(evidence, recorded, OWNER)), encoding="utf-8")
    there, source = read_capture(file)
    assert "doctor --capture" in source
    here = diagnose(Evidence(**(vars(evidence) | {"recorded": True})), all_checks())
    assert [(one.row, one.status, one.subject) for one in here.findings] == [
        (one.row, one.status, one.subject) for one in diagnose(there, all_checks()).findings
    ]
    assert there.machine.topology == evidence.machine.topology
    assert there.machine.host.memory_limit_bytes == evidence.machine.host.memory_limit_bytes
    assert there.machine.gpus == evidence.machine.gpus


def test_only_variables_of_the_policy_are_taken() -> None:
    kept = of_policy({**ENVIRON, "HSA_OVERRIDE_GFX_VERSION_1": "11.0.0", "NCCL_THING": "x"})
    assert kept.keys() == ENVIRON.keys() - {"HF_TOKEN", "WANDB_API_KEY", "USER", "HOSTNAME"} | {
        "HSA_OVERRIDE_GFX_VERSION_1"
    }


def test_the_users_variables_are_told_from_ours() -> None:
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
    found = Owner.of_this_machine(
        {"USER": "render", "LOGNAME": "marguerite", "HOSTNAME": "thunderbird.lan", "HOME": "/srv/mag-home"}
    )
    assert "render" not in found.users
    assert {"marguerite", "mag-home"} <= set(found.users)
    assert {"thunderbird.lan", "thunderbird"} <= set(found.hosts)
    assert "/srv/mag-home" in found.homes
    assert Owner.of_this_machine({"USER": "ab", "LOGNAME": "12345"}).users == Owner.of_this_machine({}).users


@pytest.mark.parametrize(
    "text",
    [
        "0x000000f800000000 0x000000ffffffffff 0x000000000014220c",
        "../../../devices/pci0000:00/0000:00:01.1/0000:01:00.0",
        "libbitsandbytes_rocm72.so",
        "7.2.26015",
        "AMD Ryzen 7 7800X3D 8-Core Processor",
        "expandable_segments:True,max_split_size_mb:128",
        "gfx_target_version 110000\nlocation_id 768\n",
        "6.14.0-37-generic",
        "CONFIG_HSA_AMD_P2P=y",
    ],
)
def test_what_says_nothing_about_anybody_stays_as_it_is(text: str) -> None:
    assert OWNER.out_of(text) == text == OWNER.out_of_variable(text)


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
            for section, value in (
                ("process", {"groups": "all"}),
                ("process", {"groups": [None]}),
                ("process", {"shm_bytes": True}),
                ("process", {"release": 6}),
                ("process", [1]),
                ("names", {"a": "b"}),
                ("names", {"a": [1]}),
                ("errors", {"a": 13}),
                ("nodes", {"a": True}),
                ("nodes", {"a": {"usable": "yes"}}),
                ("binary", {"a": "\u00e4"}),
            )
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
    assert "does not say" in source
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
