"""What is read of torch and its neighbours: whole where they are healthy, and never a crash where they are not.

No AMD machine is at hand, so torch is a stand-in package where it has to see cards; it is found and asked the same way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_rocm_tune.machine.software import PACKAGES, Software, TorchDevice, read_software

# One process reads many stand-ins, each as if nothing had been imported before: starting it is what costs time.
_READ = """
import dataclasses, importlib, json, sys
from hf_rocm_tune.machine.software import read_software
path = list(sys.path)
for folder, deadline_s in json.load(sys.stdin):
    sys.path[:] = [folder, *path]
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    print(json.dumps(dataclasses.asdict(read_software(deadline_s=deadline_s))))
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
HANG = "open({pid!r}, 'w').write(str(__import__('os').getpid())); __import__('time').sleep(600)"
# Code of a torch, seconds that it has, and what is said of its devices.
BROKEN = {
    "library": ("raise ImportError('libamdhip64.so.7: cannot open shared object file')", 20, "libamdhip64.so.7"),
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 20, "SIGSEGV while importing torch"),
    "exit": ("import os; print('HSA_STATUS_ERROR_OUT_OF_RESOURCES', flush=True); os._exit(7)", 20, "OUT_OF_RESOURCES"),
    "bytes": ("import sys; sys.stdout.buffer.write(bytes(range(256)) * 4000); raise RuntimeError('no driver')", 20,
              "no driver"),
    "hang": (HANG, 2, "while importing torch"),
    "no driver": (f"{HEALTHY}cuda.init = lambda: (_ for _ in ()).throw(RuntimeError('No HIP GPUs are available'))", 20,
                  "RuntimeError: No HIP GPUs are available"),
    "hanging driver": (f"{HEALTHY}cuda.init = lambda: __import__('time').sleep(600)", 3, "while asking torch for its"),
}  # fmt: skip


def stand_in(folder: Path, code: str, version_py: str = ROCM_VERSION_PY) -> Path:
    """A package named torch that runs ``code`` when it is imported."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code, encoding="utf-8")
    (package / "version.py").write_text(version_py, encoding="utf-8")
    return folder


def read_all(folders: dict[str, tuple[Path, float]], checkout: Path, *options: str) -> dict[str, Software]:
    """``read_software`` in a process that finds packages in each folder first; ``-S`` leaves out all others."""
    environ = {**os.environ, "PYTHONPATH": str(checkout), "HF_ROCM_TUNE_QUIET": "1", "CC": "/nowhere/cc"}
    given = json.dumps([[str(folder), deadline_s] for folder, deadline_s in folders.values()])
    line = [sys.executable, *options, "-P", "-c", _READ]
    done = subprocess.run(line, input=given, env=environ, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = []
    for values in map(json.loads, done.stdout.splitlines()):
        devices = values.pop("devices")
        known = None if devices is None else tuple(TorchDevice(**device) for device in devices)
        found.append(Software(**values, devices=known))
    return dict(zip(folders, found, strict=True))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> dict[str, Software]:
    """What is read of a healthy torch, of broken ones, and of one whose files have another form."""
    root = tmp_path_factory.mktemp("torches")
    folders = {"healthy": (stand_in(root / "healthy", HEALTHY), 20.0)}
    folders["no form"] = (stand_in(root / "no form", "raise ImportError('broken')", "__version__ = 5"), 20)
    for name, (code, deadline_s, _) in BROKEN.items():
        folders[name] = (stand_in(root / name, code.replace("{pid!r}", repr(str(root / "pid")))), deadline_s)
    found = read_all(folders, checkout)
    with pytest.raises(ProcessLookupError):  # what hangs is killed
        os.kill(int((root / "pid").read_text()), 0)
    return found


def test_a_healthy_rocm_build_is_read_whole(told: dict[str, Software]) -> None:
    software = told["healthy"]
    assert (software.build, software.torch_version) == ("rocm", "2.13.0+rocm10.0.0")
    assert (software.hip_version, software.cuda_version) == ("7.15.26333", None)
    assert software.arch_list == ["gfx1030", "gfx1100"] and "/nowhere/cc" in software.missing_for_triton
    assert software.devices is not None
    first, second = software.devices
    assert (first.index, first.arch, first.total_bytes) == (0, "gfx1100", 21458059264)
    assert first.pci_address == "0000:2d:00.0"
    assert (second.arch, second.pci_address) == ("gfx90a", None), "features are no architecture; no address is invented"


@pytest.mark.parametrize("name", BROKEN)
def test_what_fails_leaves_the_versions_of_its_files_and_a_reason(name: str, told: dict[str, Software]) -> None:
    software, said = told[name], BROKEN[name][2]
    assert software.torch_version == "2.13.0+rocm10.0.0" and software.hip_version == "7.15.26333"
    assert software.devices is None
    assert said in software.problems["devices"] and software.problems["devices"].isprintable()
    assert (software.arch_list is None) == (name != "no driver")


def test_a_version_file_of_another_form_is_unknown_and_no_cpu_build(told: dict[str, Software]) -> None:
    software = told["no form"]
    assert software.torch_version is None and "broken" in software.problems["torch_version"]
    assert software.build is None and software.hip_version is None


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


def test_without_site_packages_the_rest_is_read(tmp_path: Path, checkout: Path) -> None:
    """Where nothing is installed, or only remains of torch, wheels of ROCm and records that are broken."""
    records = {name: f"Name: {name}\nVersion: 10.0.0\n".encode() for name in ("rocm_sdk_device_gfx1100", "rocmlike")}
    records |= {"rocm-sdk-libraries": b"\xff\xfe\x00 nonsense", "trl": b"\xff\xfe\x00", "peft": b"Name: peft\n"}
    records |= {"pytorch_triton_rocm": b"Name: pytorch-triton-rocm\nVersion: 3.5.1\n"}
    for name, record in records.items():
        info = tmp_path / "wheels" / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_bytes((b"" if record.startswith(b"\xff") else b"Metadata-Version: 2.1\n") + record)
    (tmp_path / "remains/torch/lib").mkdir(parents=True)
    found = read_all({name: (tmp_path / name, 20) for name in ("remains", "wheels")}, checkout, "-S")
    software = found["remains"]
    asked = ("torch_version", "arch_list", "devices")
    assert software.build is None and software.problems == dict.fromkeys(asked, "torch is not installed")
    assert set(software.packages.values()) == {None} and not software.bitsandbytes_libraries
    assert found["wheels"].rocm_wheels == {"rocm-sdk-device-gfx1100": "10.0.0"}
    packages = found["wheels"].packages
    assert packages["triton"] == "3.5.1", "ROCm wheels bring a triton of another name"
    assert packages["trl"] is packages["peft"] is None
