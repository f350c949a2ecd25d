"""A machine is read whole; a recording of it gives the same machine; nonsense anywhere never ends in an exception."""

from __future__ import annotations

import base64
import errno
import gzip
import itertools
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_rocm_tune.machine.software import TorchDevice
from hf_rocm_tune.machine.survey import JoinedDevice, Machine, join, record, survey
from hf_rocm_tune.machine.sysfs import LiveTree, Reading, RecordedTree
from tests.machine.trees import RAPHAEL, STRIX_HALO, XT, XTX, Built, Slot

NONSENSE = (
    "",
    "\n",
    "-",
    "0x",
    "0xffffffffffffffffffffffff",
    "9" * 40,
    "-1",
    "\u0661",
    "\ud800",
    "a\0b",
    "x" * 2000,
    "0 " * 500,
    '"',
    "0::/\n5:memory:/../../a\n0:memory\n",
    "../../../devices/pci0000:00/0000:03:00.0",
    "../0000:00:01.1/0000:00:01.1/0000:03:00.0",
    "/" * 50,
    "MemTotal: 1 kB\x0bMemTotal: 9 kB\n\x1cSeccomp:\n 1\nSeccomp:\t7\n",
    "CONFIG_HSA_AMD_P2P=y\x1cCONFIG_PCI_P2PDMA=m\n  # CONFIG_PCIEAER is not set\nCONFIG_HSA_AMD=",
    'iommu=pt amdgpu.pcie_p2p=0 iommu pci="a b" iommu=\'',
    "model name :\nmodel name\t: x\nmodel name\t: y",
)
BINARY = (
    b"\0",
    b"\xff\xfe",
    b"\x1f\x8b",
    gzip.compress(b"CONFIG_HSA_AMD_P2P=y\n", mtime=0),
    b"\x78\x00\x01\x03" + b"\xff" * 20,
)


def rich() -> dict[str, Any]:
    """A machine with one of everything."""
    built = Built("invented: everything at once").kernel(amdgpu_version="6.16.13").card(XT, slot=Slot(width=8))
    built.card(XTX, slot=Slot(width=4, chipset=True, idle=True), aer={"correctable": 7}).igpu(RAPHAEL).nvidia()
    built.container("docker").memory_limit(1 << 34)
    built.binary["proc/config.gz"] = base64.b64encode(gzip.compress(b"CONFIG_HSA_AMD_P2P=y\n")).decode()
    return built.recording()


RICH = rich()


def readings(value: Any) -> list[Reading[Any]]:
    """Every reading in a record, however deep."""
    if isinstance(value, Reading):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        return [found for field in fields(value) for found in readings(getattr(value, field.name))]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for one in value for found in readings(one)] if isinstance(value, tuple | list) else []


def test_a_machine_is_read_whole() -> None:
    built = Built("invented: one card and the GPU in the processor").card(XT).igpu()
    machine = survey(built.tree())
    assert [gpu.address for gpu in machine.gpus] == ["0000:03:00.0", "0000:04:00.0"]
    card, igpu = machine.gpus
    assert (card.integrated, igpu.integrated) == (False, True)
    assert machine.cards == (card,)
    assert card.identity.card is not None
    assert (card.identity.card.key, card.arch, card.driver.value) == ("7900 xt", "gfx1100", "amdgpu")
    assert card.bar_bytes.value == 32 << 30
    assert card.iommu_type.value == "DMA-FQ"
    assert card.sensors.vram_used_bytes.value == 26 << 20
    assert [node.path for node in machine.host.nodes] == ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129"]
    assert machine.host.groups.value == ("render",)
    assert machine.unlisted == ()


@pytest.mark.parametrize("chip", [RAPHAEL, STRIX_HALO])
def test_an_integrated_gpu_is_known_without_the_compute_driver(chip: Any) -> None:
    (gpu,) = survey(Built("invented: no KFD").igpu(chip, kfd=False).tree()).gpus
    assert gpu.node is None
    assert gpu.integrated is True


class Busy(LiveTree):
    """This machine, whose free memory is another at each read."""

    reads = itertools.count()

    def read(self, path: str, limit: int) -> bytes:
        content = super().read(path, limit)
        free = f"MemAvailable: {next(self.reads)} kB\n".encode()
        return re.sub(rb"MemAvailable:.*\n", free, content) if path == "proc/meminfo" else content


def test_a_recording_of_the_live_machine_gives_the_same_machine() -> None:
    machine, recording = record(Busy(), source="here")
    replayed = survey(RecordedTree(json.loads(json.dumps(recording))))
    # What changes between two moments is in the recording as it was read.
    assert replayed == machine


def test_a_recording_of_a_recording_is_the_same_again() -> None:
    machine, recording = record(RecordedTree(RICH), source="first")
    again, second = record(RecordedTree(recording), source="first")
    assert machine == again == survey(RecordedTree(RICH))
    assert recording == second
    assert len(machine.gpus) == 4


def test_a_directory_is_surveyed_as_its_recording_is(tmp_path: Path) -> None:
    for path, text in RICH["files"].items():
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    for path, packed in RICH["binary"].items():
        (tmp_path / path).write_bytes(base64.b64decode(packed))
    for path, target in RICH["links"].items():
        if path.endswith(("/driver", "/iommu_group")):
            (tmp_path / path).symlink_to(target)
    written, built = survey(LiveTree(tmp_path)), survey(RecordedTree(RICH))
    assert written.topology == built.topology
    assert written.kernel.config == built.kernel.config
    assert [gpu.sensors for gpu in written.gpus] == [gpu.sensors for gpu in built.gpus]
    assert [gpu.identity for gpu in written.gpus] == [gpu.identity for gpu in built.gpus]


def test_an_empty_machine_is_all_unknown_and_says_why() -> None:
    machine = survey(RecordedTree({"schema": 1}))
    assert machine.gpus == ()
    assert machine.unlisted
    assert all(reading.reason for reading in readings(machine) if reading.value is None)
    assert not any(reading.value for reading in readings(machine))


def entries() -> list[tuple[str, str]]:
    return [(section, path) for section in ("files", "binary", "links", "names", "nodes") for path in RICH[section]]


def damage(recording: dict[str, Any], section: str, path: str, how: tuple[str, Any]) -> None:
    """Put something else where an entry was."""
    kind, what = how
    recording[section].pop(path, None)
    if kind == "text":
        recording["links" if section == "links" else "files"][path] = what
    elif kind == "binary":
        recording["binary"][path] = base64.b64encode(what).decode()
    elif kind == "error":
        recording["errors"][path] = what
    elif kind == "directory":
        recording["files"][f"{path}/inner"] = "x"
    elif kind == "names":
        recording["names"][path] = what


HOW = st.one_of(
    st.tuples(st.just("text"), st.sampled_from(NONSENSE) | st.text(max_size=40)),
    st.tuples(st.just("binary"), st.sampled_from(BINARY) | st.binary(max_size=200)),
    st.tuples(st.just("error"), st.sampled_from([*sorted(errno.errorcode.values()), "ENONSENSE"])),
    st.tuples(st.just("directory"), st.none()),
    st.tuples(st.just("names"), st.lists(st.sampled_from([*NONSENSE, "1", "0000:99:00.0", "hwmon9"]) | st.text())),
    st.tuples(st.just("gone"), st.none()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(damages=st.lists(st.tuples(st.sampled_from(entries()), HOW), min_size=1, max_size=25))
def test_nonsense_in_any_entries_never_raises_and_is_recorded_as_it_is(damages: list[Any]) -> None:
    recording = json.loads(json.dumps(RICH))
    for (section, path), how in damages:
        damage(recording, section, path, how)
    tree = RecordedTree(recording)
    machine = survey(tree)
    assert isinstance(machine, Machine)
    recorded, kept = record(tree)
    assert recorded == machine
    assert survey(RecordedTree(json.loads(json.dumps(kept)))) == machine


@pytest.mark.parametrize("name", ["EACCES", "EPERM", "EIO", "ELOOP", "ENOTDIR"])
def test_a_machine_that_may_not_be_read_says_so_everywhere(name: str) -> None:
    recording = {"schema": 1, "errors": {path: name for section, path in entries()}}
    recording["errors"] |= dict.fromkeys(("sys/bus/pci/devices", "sys/class", "dev/dri", "sys/class/kfd"), name)
    machine = survey(RecordedTree(recording))
    assert machine.gpus == ()
    assert machine.unlisted
    assert not machine.topology.complete
    assert all(node.usable is None for node in machine.host.nodes)


def test_a_recording_holds_nothing_that_is_not_read() -> None:
    built = Built("invented: a machine with secrets").card(XT)
    built.files["proc/cmdline"] = "root=UUID=secret-disk cryptdevice=secret iommu=pt secret\n"
    built.files["proc/cpuinfo"] = "model name\t: A CPU\nserial\t: secret\n"
    built.files["proc/self/status"] = "Name:\tsecret\nGroups:\t1000\nSeccomp:\t0\n"
    built.files["boot/config-6.14.0-37-generic"] += "CONFIG_DEFAULT_HOSTNAME=secret\n"
    built.binary["proc/config.gz"] = base64.b64encode(
        gzip.compress(b"CONFIG_X=secret\nCONFIG_HSA_AMD_P2P=y\n")
    ).decode()
    built.process["groups"] = ["secret", "render"]
    machine, recording = record(built.tree())
    unpacked = [gzip.decompress(base64.b64decode(recording["binary"].pop("proc/config.gz")))]
    assert b"secret" not in unpacked[0]
    assert "secret" not in json.dumps(recording)
    assert machine.kernel.cmdline.value == {"iommu": "pt"}
    assert machine.kernel.config.value == {"CONFIG_HSA_AMD_P2P": "y"}


# Which card is which device of torch.

HIP = "HIP_VISIBLE_DEVICES"


def device(index: int, address: str | None, arch: str = "gfx1100") -> TorchDevice:
    return TorchDevice(index=index, name="AMD Radeon", arch=arch, total_bytes=20464 << 20, pci_address=address)


def joined(built: Built, *devices: TorchDevice, environ: dict[str, str] | None = None) -> tuple[JoinedDevice, ...]:
    return join(survey(built.tree()), devices, environ or {})


TWO = Built("invented").card(XT).card(XTX)
ONE, OTHER = "0000:03:00.0", "0000:06:00.0"


@pytest.mark.parametrize(
    ("built", "devices", "environ", "found"),
    [
        (TWO, [device(0, OTHER), device(1, ONE)], {}, [OTHER, ONE]),  # by the address, not by the index
        (TWO, [device(0, None), device(1, None)], {}, [ONE, OTHER]),  # without one, by the order of the kernel
        (TWO, [device(0, None)], {HIP: "1"}, [OTHER]),
        (TWO, [device(0, None)], {}, [None]),  # a list of another length tells nothing
        (TWO, [device(0, None), device(1, None)], {HIP: "GPU-abc"}, [None, None]),
        (Built("invented").card(XT), [device(0, "0000:7f:00.0")], {}, [None]),
        (Built("invented").nvidia(), [device(0, "0000:01:00.0", "sm_89")], {}, ["0000:01:00.0"]),
    ],
)
def test_a_device_is_told_by_its_address_else_by_a_certain_order(
    built: Built, devices: list[TorchDevice], environ: dict[str, str], found: list[str | None]
) -> None:
    result = joined(built, *devices, environ=environ)
    assert [one.gpu.address if one.gpu else None for one in result] == found
    assert all(one.reason and not (one.gpu is None and one.spoofed) for one in result)


def test_a_gpu_in_the_processor_is_recognised() -> None:
    built = Built("invented").igpu(RAPHAEL).card(XT)
    result = joined(built, device(0, "0000:01:00.0", "gfx1036"), device(1, "0000:04:00.0"))
    assert [one.gpu is not None and one.gpu.integrated for one in result] == [True, False]
    assert not any(one.spoofed for one in result)


def test_an_override_variable_shows_as_another_architecture() -> None:
    result = joined(Built("invented").card(XT).igpu(), device(0, ONE), device(1, "0000:04:00.0", "gfx1100"))
    assert [one.spoofed for one in result] == [False, True]


def test_without_an_address_an_incomplete_list_tells_nothing() -> None:
    built = Built("invented").card(XT).card(XTX)
    built.files["sys/class/kfd/kfd/topology/nodes/1/properties"] = ""
    assert [one.gpu for one in joined(built, device(0, None))] == [None]
