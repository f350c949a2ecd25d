"""Checks of torch, Triton's compiler and bitsandbytes: whether their builds fit the machine, this project and each
other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from hf_rocm_tune.doctor.findings import Check, Evidence, Finding, fail, note, ok, unknown, warn
from hf_rocm_tune.doctor.system import in_wheels
from hf_rocm_tune.machine.process import FILTERS
from hf_rocm_tune.machine.software import Software

_FORCING = "BNB_ROCM_VERSION"  # read by bitsandbytes, cextension.py
_LIBRARY = re.compile(r"libbitsandbytes_rocm([0-9])([0-9]{1,2})\.(?:so|dll)")
_INDEX = "--index-url https://download.pytorch.org/whl/rocm7.2"
_VERSIONS, _OURS = "PyTorch: previous versions", "this project: pyproject.toml"
# Versions below which results on this card were reported wrong, how, and where.
_HARMFUL = {
    "torch": ("2.10", "attention of torch 2.9 gives NaN on gfx1100 (AOTriton 0.11b), and older ones have no fused one",
              "aotriton#123; pytorch#166397"),
    "bitsandbytes": ("0.50.0", "below 0.50.0, NaN in 4-bit were reported on ROCm, and wrong blocks of 64 on RDNA",
                     "unsloth#7535; bitsandbytes#1885; bitsandbytes#1979; bitsandbytes#2012"),
}  # fmt: skip


def requirements() -> dict[str, Requirement]:
    """What this package requires, by import name; its lower bounds are the versions that it is tested with.

    Empty where the package is run without having been installed.
    """
    try:
        stated = map(Requirement, metadata.requires("hf-rocm-tune") or ())
    except metadata.PackageNotFoundError:
        return {}
    return {one.name.replace("-", "_"): one for one in stated if one.marker is None}


def _install(name: str) -> str:
    wanted = requirements().get(name, name)
    # Without an index, pip would replace a ROCm build by one for another vendor.
    return f'`pip install "{wanted}"{f" --force-reinstall {_INDEX}" if name == "torch" else ""}`'


def _version(text: str | None) -> Version | None:
    try:
        return Version(text or "")
    except InvalidVersion:
        return None


def _torch(evidence: Evidence) -> Iterator[Finding]:
    software, version = evidence.software, evidence.software.torch_version
    # The AMD GPUs that torch should compute on.
    known = [
        gpu.card.name if gpu.card else f"an AMD {gpu.arch or 'GPU'}" for gpu in evidence.candidates if in_wheels(gpu)
    ]
    card = " and ".join(known)
    if version is None:
        yield fail("torch_missing", "torch cannot be used", software.problems.get("torch_version", ""),
                   f"{_install('torch')} (ROCm on Linux)", _VERSIONS)  # fmt: skip
    elif software.build == "rocm":
        yield from _rocm_build(evidence, software, version)
    elif not card:
        yield ok("torch_no_gpu_needed", f"torch {version}", "no ROCm build, and no AMD card", _VERSIONS)
    elif software.build == "cuda" and evidence.devices:
        seen = ", ".join(device.name for device in evidence.devices)
        yield note("torch_cuda_beside", "torch computes on the NVIDIA card",
                   f"torch {version} is built for CUDA and sees {seen}; {card} stays idle",
                   "to train on the AMD card, use another environment with a ROCm build of torch",
                   _VERSIONS)  # fmt: skip
    else:
        build = f"built for CUDA {software.cuda_version}" if software.build == "cuda" else "a CPU build"
        yield fail("torch_wrong_build", "torch is not a ROCm build",
                   f"torch {version} is {build}, and this machine has {card}",
                   f"{_install('torch')}; plain `pip install torch` does not install a ROCm build",
                   f"{_VERSIONS}; uv#17674")  # fmt: skip


def _rocm_build(evidence: Evidence, software: Software, version: str) -> Iterator[Finding]:
    filters = " and ".join(f"{name}={evidence.environ[name]}" for name in FILTERS if name in evidence.environ)
    if not software.devices:
        reason = (
            f"torch {version} is a ROCm build and lists no GPU: {software.problems.get('devices', 'an empty list')}"
        )
        if not evidence.candidates:
            yield unknown(f"{reason}; this machine has none")
            return
        yield fail("torch_sees_nothing", "torch sees no GPU", f"{reason}; this machine has {len(evidence.candidates)}",
                   "check the findings on access and variables (a *_VISIBLE_DEVICES may hide it), then `rocminfo`; "
                   "after a hang or a crash, `sudo dmesg | tail`", "pytorch hip.rst; HIP environment variables page",
                   read=[filters] if filters else ())  # fmt: skip
        return
    seen = ", ".join(f"{one.name} ({one.arch}, {one.total_bytes / (1 << 30):.1f} GiB)" for one in software.devices)
    text = f"a ROCm build (HIP {software.hip_version}); it sees {seen}"
    yield ok("torch_rocm", f"torch {version}", text, "pytorch hip.rst")
    known = [gpu for _, gpu in evidence.joined if gpu is not None]
    cards = [gpu for gpu in known if gpu in evidence.cards]
    if len(cards) < len(evidence.cards) and len(known) == len(software.devices):
        yield note("torch_sees_fewer", f"torch sees {len(cards)} of {len(evidence.cards)} cards",
                   f"not all discrete cards are visible to torch{f': {filters} is set' if filters else ''}",
                   "change or unset the filter to train on all of them", "HIP environment variables page")  # fmt: skip


def _architectures(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    true = {gpu.address: gpu.arch for gpu in evidence.candidates if gpu.arch}
    if not evidence.candidates or software.build != "rocm":
        return
    for device, gpu in evidence.joined:
        if gpu is not None and gpu.node is not None and gpu.node.arch != device.arch:
            yield fail("arch_spoofed", "torch reports another architecture than the card's",
                       f"{gpu.address} is {gpu.arch} in the kernel's list, and {device.arch} in torch's: code for the "
                       "wrong one crashes or gives wrong results",
                       "unset HSA_OVERRIDE_GFX_VERSION and its per-node forms",
                       "libhsakmt topology.c; TheRock#5543; unsloth install.sh", gpu.address)  # fmt: skip
    built = software.arch_list
    if not built or not true:
        yield unknown(software.problems.get("arch_list", "the architectures of torch or of the GPUs are unknown"))
        return
    # Wheels of one family of architectures contain all kernels; multi-architecture ones have them in separate wheels.
    wheels, rocm = software.rocm_wheels, _version((software.torch_version or "").partition("+rocm")[2])
    apart = any("device-" in name for name in wheels) or not any("gfx" in name for name in wheels)
    apart = apart and bool(wheels) and rocm is not None and rocm.major >= 10
    for address, arch in true.items():
        if arch not in built:
            yield fail("arch_missing", f"torch has no code for {arch}",
                       f"{address} is {arch}, and this build has {' '.join(built)}: the first kernel fails",
                       f"install a wheel with {arch}: those of download.pytorch.org have gfx1100 from rocm6.0 on, "
                       "those of repo.amd.com/rocm one index or extra for each; do not set HSA_OVERRIDE_GFX_VERSION",
                       "uv#18730; TheRock#5543; TheRock RELEASES.md", address)  # fmt: skip
        elif apart and not any(name.endswith(f"device-{arch}") for name in wheels):
            yield fail("device_wheel_missing", f"torch's kernels for {arch} are not installed",
                       f"this is a multi-architecture build of ROCm {rocm} with kernels in separate wheels, and that "
                       f"of {arch} is missing: torch lists the card, and its first kernel fails (hipErrorInvalidImage)",
                       f"install `torch[device-{arch}]` from the same index", "TheRock RELEASES.md; uv#21683",
                       address, [f"{name} {one}" for name, one in wheels.items()])  # fmt: skip
        else:
            yield ok("arch_ok", f"code for {arch}", f"this build has {' '.join(built)}", "uv#18730")


def _compiler(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software.build != "rocm" or software.packages.get("triton") is None:
        return
    source, missing = "triton driver.c: compiled at the first launch", software.missing_for_triton
    if missing:
        what, _, package = missing.rpartition(": install ")
        yield warn("triton_cannot_compile", "Triton cannot start",
                   f"{what or missing}. Triton compiles a C file against Python's headers at its first launch: without "
                   "them, digests on the card and TRL's fused loss use slower ways",
                   f"install {package or 'gcc and python3-dev'}, for example `sudo apt install gcc python3-dev`",
                   source)  # fmt: skip
    else:
        yield ok("compiler_ok", "C compiler and Python.h", "Triton's driver can be compiled", source)


def _bitsandbytes(evidence: Evidence) -> Iterator[Finding]:
    software, source = evidence.software, "bitsandbytes cextension.py"
    version, forced = software.packages.get("bitsandbytes"), evidence.environ.get(_FORCING)
    hip, title = _version(software.hip_version), f"bitsandbytes {version}"
    # Version of HIP to file; ``rocm715`` is 7.15. The loader of 0.50 (cextension.py) takes the exact one, the nearest
    # older, the nearest newer, never one of another major version.
    matches = filter(None, map(_LIBRARY.fullmatch, software.bitsandbytes_libraries))
    found = sorted(((int(one[1]), int(one[2])), one[0]) for one in matches)
    same = [one for one in found if hip and one[0][0] == hip.major]
    if version is None:
        yield note("bnb_missing", "bitsandbytes is not installed",
                   "4-bit and 8-bit weights and 8-bit optimizers are not available; LoRA in bf16 works",
                   f"{_install('bitsandbytes')} for QLoRA", "bitsandbytes installation page")  # fmt: skip
    elif software.build != "rocm":
        return
    elif forced is not None:
        yield unknown(f"{_FORCING}={forced} chooses the library, whatever torch's build")
    elif hip is None or not software.bitsandbytes_libraries:
        yield unknown(f"bitsandbytes has no native library, or HIP {software.hip_version} is no version")
    elif not same:
        listed = ", ".join(f"{major}.{minor}" for (major, minor), _ in found) or "no ROCm at all"
        yield warn("bnb_no_library", f"{title} has no library for this build",
                   f"torch is built with HIP {hip}; bitsandbytes has libraries for {listed}, and does not load one of "
                   "another major version, so --load_in_4bit and --load_in_8bit cannot work",
                   f"use a torch build with one of {listed}, or train without quantisation", source)  # fmt: skip
    else:
        taken, file = next((one for one in reversed(same) if one[0] <= (hip.major, hip.minor)), same[0])
        if taken == (6, 4) and any(gpu.arch == "gfx1100" for gpu in evidence.candidates):
            yield warn("bnb_rocm64", "4-bit products were reported wrong with this library on gfx1100",
                       f"{title} loads {file} here. Two owners of gfx1100 cards got wrong products of 4-bit weights "
                       "with it; its machine code, executed by this project's interpreter, is 12 per cent off",
                       "use a torch build with ROCm 7.2, which loads another; `doctor --only nf4` tests it",
                       "bitsandbytes#2087; bitsandbytes#2089")  # fmt: skip
        else:
            yield ok("bnb_library", title, f"for HIP {hip} it loads {file}", source)


def _tested(evidence: Evidence) -> Iterator[Finding]:
    packages = evidence.software.packages
    wanted = {name: one for name, one in requirements().items() if name in packages}
    right = bool(wanted)
    if not wanted:
        yield unknown("hf-rocm-tune is not installed, so what it requires is not known")
    for name, required in wanted.items():
        text, version = packages[name], _version(packages[name])
        below, harm, source = _HARMFUL.get(name, ("0", "", ""))
        if text is None and name in ("bitsandbytes", "torch"):  # those have their own checks
            continue
        if text is None:
            right = False
            yield fail("version_missing", f"{name} is not installed", "training needs it", _install(name), _OURS, name)
        elif version is None or not required.specifier.contains(version, prereleases=True):
            right = False
            harmful = harm and version and version < Version(below) and evidence.software.build == "rocm"
            yield (fail if harmful else warn)(
                "version_untested", f"{name} {text} is not a version that was tested",
                f"this project is tested with {required.specifier}, and uses private functions of its upstream "
                f"libraries{f'; {harm}' if harmful else ''}",
                _install(name), f"{_OURS}; {source}" if harmful else _OURS, name)  # fmt: skip
    if right:
        seen = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        yield ok("versions_tested", "tested library versions", seen, _OURS)


CHECKS = (
    Check("torch", "software", "torch's build and its devices", _torch),
    Check("arch", "software", "torch's code for every card", _architectures),
    Check("compiler", "software", "the C compiler and Python.h that Triton needs", _compiler),
    Check("bitsandbytes", "software", "which library of bitsandbytes is loaded", _bitsandbytes),
    Check("versions", "software", "installed and tested versions of the libraries", _tested),
)
