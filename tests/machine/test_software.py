"""What is read of torch and its neighbours: whole where they are healthy, and never a crash where they are not.

No AMD machine is at hand, so torch is a stand-in package where it has to see cards; it is found and asked the same way.
Each reading is made by a process of its own, whose path begins with the stand-in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.machine.software import PACKAGES, Software, TorchDevice, read_software

# One process reads many stand-ins, each as if nothing had been imported before: starting it is what costs time.
_READ = """
import dataclasses, importlib, json, sys
from hf_rocm_tune.machine.software import read_software
path = list(sys.path)
for folder, deadline_s, in_process in json.load(sys.stdin):
    sys.path[:] = [folder, *path]
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    print(json.dumps(dataclasses.asdict(read_software(deadline_s=deadline_s, in_process=in_process))))
"""
ROCM_VERSION_PY = """
from typing import Optional
__version__ = '2.13.0+rocm10.0.0'
debug = False
cuda: Optional[str] = None
hip: Optional[str] = '7.15.26333'
rocm: Optional[str] = '10.0.0'
"""
HEALTHY = """
from types import SimpleNamespace
from torch import version
__version__ = version.__version__
_CARDS = [
    SimpleNamespace(name="Radeon RX 7900 XT", gcnArchName="gfx1100", total_memory=21458059264,
                    pci_domain_id=0, pci_bus_id=0x2d, pci_device_id=0),
    SimpleNamespace(name="AMD Instinct MI210", gcnArchName="gfx90a:sramecc+:xnack-", total_memory=68702699520),
]
cuda = SimpleNamespace(init=lambda: None, device_count=lambda: len(_CARDS), get_device_properties=_CARDS.__getitem__,
                       get_arch_list=lambda: ["gfx1030", "gfx1100"])
"""


def stand_in(folder: Path, code: str, version_py: str = ROCM_VERSION_PY) -> Path:
    """A package named torch that runs ``code`` when it is imported."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code, encoding="utf-8")
    (package / "version.py").write_text(version_py, encoding="utf-8")
    return folder


def _software(values: dict[str, Any]) -> Software:
    devices = values["devices"]
    known = None if devices is None else tuple(TorchDevice(**device) for device in devices)
    return Software(**{**values, "devices": known})


def read_all(
    folders: list[Path], checkout: Path, *, deadline_s: float = 20, in_process: bool = False, options: Any = ()
) -> list[Software]:
    """``read_software`` in a process that finds packages in each folder first; ``-S`` leaves out all others."""
    environ = {**os.environ, "PYTHONPATH": str(checkout), "HF_ROCM_TUNE_QUIET": "1"}
    given = json.dumps([[str(folder), deadline_s, in_process] for folder in folders])
    line = [sys.executable, *options, "-P", "-c", _READ]
    done = subprocess.run(line, input=given, env=environ, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [_software(json.loads(line)) for line in done.stdout.splitlines()]


def read_with(folder: Path, checkout: Path, **options: Any) -> Software:
    return read_all([folder], checkout, **options)[0]


def test_a_healthy_rocm_build_is_read_whole(tmp_path: Path, checkout: Path) -> None:
    software = read_with(stand_in(tmp_path, HEALTHY), checkout)
    assert software.build == "rocm"
    assert software.torch_version == "2.13.0+rocm10.0.0"
    assert (software.hip_version, software.torch_rocm_version, software.cuda_version) == ("7.15.26333", "10.0.0", None)
    assert software.arch_list == ["gfx1030", "gfx1100"]
    assert software.devices is not None
    first, second = software.devices
    assert (first.index, first.arch, first.total_bytes) == (0, "gfx1100", 21458059264)
    assert first.pci_address == "0000:2d:00.0"
    assert (second.arch, second.pci_address) == ("gfx90a", None), "features are no architecture; no address is invented"


def test_this_installation_is_read() -> None:
    import torch

    software = read_software()
    assert software.torch_version == torch.__version__
    assert software.packages["transformers"] and software.packages.keys() == PACKAGES.keys()
    assert software.arch_list == tuple(torch.cuda.get_arch_list())
    assert software.devices is not None and len(software.devices) == torch.cuda.device_count()
    assert "libbitsandbytes_rocm72.so" in software.bitsandbytes_libraries
    assert sys.modules["torch"] is torch


@pytest.mark.gpu
def test_a_device_has_the_address_that_the_kernel_lists() -> None:
    devices = read_software().devices
    assert devices
    for device in devices:
        assert device.total_bytes > 1 << 30
        assert device.pci_address is None or Path("/sys/bus/pci/devices", device.pci_address).exists()


@pytest.fixture(scope="module")
def without_site_packages(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> dict[str, Software]:
    """What is read where nothing is installed, or only remains of torch, wheels of ROCm, or records that are broken."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("nothing", "remains", "wheels", "broken")}
    (folders["remains"] / "torch" / "lib").mkdir(parents=True)
    plain = ("rocm-sdk-core", "rocm_sdk_device_gfx1100", "amd-torch-device-gfx1100", "rocm", "rocmlike", "prorocm")
    records = {("wheels", name): f"Name: {name}\nVersion: 10.0.0\n".encode() for name in plain}
    records |= {("wheels", "rocm-sdk-libraries"): b"\xff\xfe\x00 nonsense", ("broken", "trl"): b"\xff\xfe\x00"}
    records |= {("broken", "peft"): b"Name: peft\n"}
    records |= {("broken", "pytorch_triton_rocm"): b"Name: pytorch-triton-rocm\nVersion: 3.5.1\n"}
    for (folder, name), record in records.items():
        info = folders[folder] / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_bytes((b"" if record.startswith(b"\xff") else b"Metadata-Version: 2.1\n") + record)
    found = read_all(list(folders.values()), checkout, options=("-S",))  # without site-packages there is no torch
    return dict(zip(folders, found, strict=True))


@pytest.mark.parametrize("name", ["nothing", "remains"])
def test_without_torch_the_rest_is_read_and_torch_is_said_to_be_missing(
    name: str, without_site_packages: dict[str, Software]
) -> None:
    software = without_site_packages[name]
    assert software.build is None
    asked = ("torch_version", "arch_list", "devices")
    assert software.problems == dict.fromkeys(asked, "torch is not installed")
    assert set(software.packages.values()) == {None} and software.bitsandbytes_libraries == ()


def test_wheels_are_listed_by_plain_names_and_broken_records_end_nothing(
    without_site_packages: dict[str, Software],
) -> None:
    carried = ("amd-torch-device-gfx1100", "rocm", "rocm-sdk-core", "rocm-sdk-device-gfx1100")
    assert without_site_packages["wheels"].rocm_wheels == dict.fromkeys(carried, "10.0.0")
    broken = without_site_packages["broken"]
    assert broken.packages["peft"] is None
    assert broken.packages["triton"] == "3.5.1", "ROCm wheels bring a triton of another name"


AT_IMPORT = [
    ("raise ImportError('libamdhip64.so.7: cannot open shared object file')", "libamdhip64.so.7: cannot open"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ("import os; print('HSA_STATUS_ERROR_OUT_OF_RESOURCES', flush=True); os._exit(7)", "OUT_OF_RESOURCES"),
    ("raise SystemExit(0)", "no result"),
    ("import sys; sys.stdout.buffer.write(bytes(range(256)) * 4000); raise RuntimeError('no driver')", "no driver"),
    ("", "AttributeError"),
]


def test_what_fails_at_import_leaves_the_versions_of_its_files(tmp_path: Path, checkout: Path) -> None:
    folders = [stand_in(tmp_path / str(number), code) for number, (code, _) in enumerate(AT_IMPORT)]
    for software, (_, said) in zip(read_all(folders, checkout), AT_IMPORT, strict=True):
        assert software.torch_version == "2.13.0+rocm10.0.0" and software.hip_version == "7.15.26333"
        assert software.arch_list is software.devices is None
        for name in ("arch_list", "devices"):
            assert said in software.problems[name] and software.problems[name].isprintable()


def test_what_hangs_at_import_is_killed_at_the_deadline(tmp_path: Path, checkout: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    software = read_with(stand_in(tmp_path, code), checkout, deadline_s=2)
    assert "had not ended" in software.problems["devices"]
    assert "while importing torch" in software.problems["devices"]
    assert software.build == "rocm"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


AT_DEVICES = [
    ("__import__('os').kill(__import__('os').getpid(), 11)", "SIGSEGV while asking torch for its devices"),
    ("__import__('time').sleep(600)", "while asking torch for its devices"),
    ("(_ for _ in ()).throw(RuntimeError('No HIP GPUs are available'))", "No HIP GPUs are available"),
    ("print('\\x00\\x1b[2J' * 9000) or (_ for _ in ()).throw(OSError('odd'))", "OSError: odd"),
]


def test_what_fails_at_the_devices_leaves_the_rest(tmp_path: Path, checkout: Path) -> None:
    folders = [
        stand_in(tmp_path / str(number), f"{HEALTHY}cuda.init = lambda: {code}\n")
        for number, (code, _) in enumerate(AT_DEVICES)
    ]
    for software, (_, said) in zip(read_all(folders, checkout, deadline_s=3), AT_DEVICES, strict=True):
        assert software.devices is None and said in software.problems["devices"]
        assert software.build == "rocm" and (software.arch_list is None) == ("while asking" in said)


def test_a_version_file_of_another_form_is_unknown_and_no_cpu_build(tmp_path: Path, checkout: Path) -> None:
    texts = ["", "__version__ = 5", "\x00\x01"]
    folders = [stand_in(tmp_path / str(n), "raise ImportError('broken')", text) for n, text in enumerate(texts)]
    for software in read_all(folders, checkout):
        assert software.torch_version is None and "broken" in software.problems["torch_version"]
        assert software.build is None and software.hip_version is None


def test_what_triton_lacks_is_asked_of_a_rocm_build(tmp_path: Path, checkout: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    plain = ROCM_VERSION_PY.replace("'7.15", "None #")
    folders = [stand_in(tmp_path / "rocm", HEALTHY), stand_in(tmp_path / "cpu", HEALTHY, plain)]
    found = read_all(folders, checkout)
    assert "/nowhere/cc" in found[0].missing_for_triton and found[1].missing_for_triton == ""
