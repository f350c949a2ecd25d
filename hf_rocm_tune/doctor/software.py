"""Checks of torch, ROCm, Triton's compiler and bitsandbytes: whether their builds fit the machine and each other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hf_rocm_tune.doctor.findings import Check, Evidence, Finding, fail, note, ok, skipped, unknown, warn
from hf_rocm_tune.doctor.system import in_wheels
from hf_rocm_tune.machine.process import FILTERS
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.variables import version_numbers, within

TESTED = {
    "torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "peft": "0.21.2", "trl": "1.16.0",
    "datasets": "5.2.0", "bitsandbytes": "0.50.2", "safetensors": "0.8.0", "huggingface_hub": "2.4.0",
}  # fmt: skip
"""The lower bounds of pyproject.toml: each is the version that was really tested. A test keeps them equal."""
_LEAST_BITSANDBYTES = "0.50.0"
_NO_ROCM_BUILD = "torch is not a ROCm build"
_FORCING = "BNB_ROCM_VERSION"  # read by bitsandbytes, cextension.py
_LIBRARY = re.compile(r"libbitsandbytes_rocm([0-9])([0-9]{1,2})\.(?:so|dll)")
_WAVE32 = ("gfx10", "gfx11", "gfx12")
_INDEX = "--index-url https://download.pytorch.org/whl/rocm7.2"
_REINSTALL = f"`pip install --force-reinstall torch=={TESTED['torch']} {_INDEX}`"
_VERSIONS, _OURS = "PyTorch: previous versions", "this project: pyproject.toml"


def minor(version: str) -> str:
    """``7.2.26015`` as ``7.2``."""
    value = version_numbers(version)
    return version if value is None else f"{value[0]}.{value[1]}"


def torch_rocm(software: Software) -> str | None:
    """The version of ROCm inside torch; None where it is no ROCm build.

    From ROCm 10 on, HIP's version is another number (10.0 comes with HIP 7.15), so it is only the last resort.
    """
    if not software.hip_version:
        return None
    named = re.search(r"\+rocm([0-9]+(?:\.[0-9]+)*)", software.torch_version or "")
    return software.torch_rocm_version or (named[1] if named else software.hip_version)


def _torch(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    version, reason = software.torch_version, software.problems.get("torch_version", "")
    # The AMD GPUs that torch should compute on.
    known = [(gpu.identity.card, gpu.arch or "GPU") for gpu in evidence.candidates if in_wheels(gpu)]
    card = " and ".join(card.name if card else f"an AMD {arch}" for card, arch in known)
    if version is None and software.packages.get("torch") is None:
        yield fail(
            "torch_missing", "torch is not installed", reason,
            f"`pip install torch=={TESTED['torch']} {_INDEX}` (ROCm on Linux)", _VERSIONS,
        )  # fmt: skip
    elif version is None:
        yield fail(
            "torch_fails", "torch cannot be read", f"it is installed, but its version could not be read: {reason}",
            f"install it again: {_REINSTALL}", _VERSIONS,
        )  # fmt: skip
    elif software.build == "rocm":
        yield from _rocm_build(evidence, software, version)
    elif not card:
        yield ok(
            "torch_no_gpu_needed", f"torch {version}", "no ROCm build, on a machine without an AMD card", _VERSIONS,
        )  # fmt: skip
    elif software.build == "cuda" and evidence.devices:
        seen = ", ".join(device.name for device in evidence.devices)
        text = f"torch {version} is built for CUDA and sees {seen}; {card} stays idle"
        yield note(
            "torch_cuda_beside", "torch computes on the NVIDIA card", text,
            "nothing to do; to train on the AMD card, use another environment with a ROCm build of torch", _VERSIONS,
        )  # fmt: skip
    elif software.build == "cuda":
        text = f"torch {version} is built for CUDA {software.cuda_version}, and the card here is {card}"
        yield fail("torch_cuda_build", "torch is a CUDA build", text, _REINSTALL, _VERSIONS)
    else:
        text = f"torch {version} has no GPU code, and this machine has {card}"
        yield fail(
            "torch_cpu_build", "torch is a CPU build", text,
            f"{_REINSTALL}; plain `pip install torch` does not install a ROCm build", f"{_VERSIONS}; uv#17674",
        )  # fmt: skip


def _rocm_build(evidence: Evidence, software: Software, version: str) -> Iterator[Finding]:
    filters = [f"{name}={evidence.environ[name]}" for name in FILTERS if name in evidence.environ]
    if not software.devices:
        reason = software.problems.get("devices", "its list is empty")
        if not evidence.candidates:
            yield unknown(f"torch {version} is a ROCm build, and there is no card: {reason}")
            return
        yield fail(
            "torch_sees_nothing", "torch sees no GPU",
            f"torch {version} is a ROCm build and this machine has {len(evidence.candidates)} GPU(s), but it lists "
            f"none: {reason}",
            "check the findings on access and variables (a *_VISIBLE_DEVICES may hide it), then `rocminfo`; after a "
            "hang or a crash, `sudo dmesg | tail`", "pytorch hip.rst; HIP environment variables page", read=filters,
        )  # fmt: skip
        return
    seen = ", ".join(f"{one.name} ({one.arch}, {one.total_bytes / (1 << 30):.1f} GiB)" for one in software.devices)
    yield ok(
        "torch_rocm", f"torch {version}", f"a ROCm build with HIP {software.hip_version}; it sees {seen}",
        "pytorch hip.rst",
    )  # fmt: skip
    known = [one.gpu for one in evidence.joined if one.gpu is not None]
    cards = [gpu for gpu in known if gpu in evidence.cards]
    if len(cards) < len(evidence.cards) and len(known) == len(software.devices):
        why = f": {' and '.join(filters)} is set" if filters else ""
        title = f"torch sees {len(cards)} of {len(evidence.cards)} cards"
        yield note(
            "torch_sees_fewer", title, f"not all discrete cards are visible to torch{why}",
            "change or unset the filter to train on all of them", "HIP environment variables page",
        )  # fmt: skip


def _architectures(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    true = {gpu.address: gpu.arch for gpu in evidence.candidates if gpu.arch}
    if not evidence.candidates or software.torch_version is None:
        return
    if software.build != "rocm":
        yield skipped(_NO_ROCM_BUILD)
        return
    for one in evidence.joined:
        if one.spoofed and one.gpu is not None:
            yield fail(
                "arch_spoofed", "torch reports another architecture than the card's",
                f"{one.gpu.address} is {one.gpu.arch} in the kernel's list, and {one.device.arch} in torch's: code "
                "for the wrong architecture crashes or gives wrong results",
                "unset HSA_OVERRIDE_GFX_VERSION and its per-node forms",
                "libhsakmt topology.c; TheRock#5543; unsloth install.sh", subject=one.gpu.address, read=[one.reason],
            )  # fmt: skip
    built = software.arch_list
    if not built or not true:
        yield unknown(software.problems.get("arch_list", "the architectures of torch or of the GPUs are unknown"))
        return
    for address, arch in true.items():
        if arch not in built:
            yield fail(
                "arch_missing", f"torch has no code for {arch}",
                f"{address} is {arch}, and this build has {' '.join(built)}: the first kernel fails "
                "(hipErrorInvalidImage or \"invalid device function\")",
                f"install a wheel with {arch}: those of download.pytorch.org have gfx1100 from rocm6.0 on, those of "
                "repo.amd.com/rocm have one index or extra for each architecture; do not set HSA_OVERRIDE_GFX_VERSION",
                "uv#18730; TheRock#5543; TheRock RELEASES.md", subject=address,
            )  # fmt: skip
    archs = sorted(set(true.values()) & set(built))
    if archs and len(archs) == len(set(true.values())):
        yield ok(
            "arch_ok", f"code for {' and '.join(archs)}", "among the architectures of this build", "uv#18730",
            read=[f"built for: {' '.join(built)}"],
        )  # fmt: skip
    rocm, wheels = torch_rocm(software), software.rocm_wheels
    # Wheels of one family of architectures contain all kernels; multi-architecture ones have them in separate wheels.
    family = any("gfx" in name for name in wheels) and not any("device-" in name for name in wheels)
    for arch in archs if rocm and within(rocm, "10", None) and wheels and not family else ():
        if not any(name.endswith(f"device-{arch}") for name in wheels):
            yield fail(
                "device_wheel_missing", f"torch's kernels for {arch} are not installed",
                f"this is a multi-architecture build of ROCm {rocm} with kernels in separate wheels, and the one for "
                f"{arch} is missing: torch lists the card, and its first kernel fails (hipErrorInvalidImage)",
                f"install `torch[device-{arch}]` from the same index", "TheRock RELEASES.md; uv#21683",
                read=[f"{name} {version}" for name, version in wheels.items()],
            )  # fmt: skip


def _rocm(evidence: Evidence) -> Iterator[Finding]:
    software, kernel = evidence.software, evidence.machine.kernel
    rocm, torch = torch_rocm(software), software.torch_version or ""
    if rocm is None:
        yield skipped(_NO_ROCM_BUILD)
        return
    driver = f"amdgpu {kernel.amdgpu_version}" if kernel.amdgpu_version else "the kernel's own"
    system = software.rocm_version or "not installed, or not found"
    gfx1100 = any(gpu.arch == "gfx1100" for gpu in evidence.cards)
    yield ok(
        "versions_of_rocm", f"ROCm {minor(rocm)}",
        f"torch brings ROCm {rocm}; the system's is {system}; the driver is {driver}, kernel "
        f"{kernel.release or 'unknown'}", "pytorch hip.rst",
    )  # fmt: skip
    if gfx1100 and within(torch, "2.9", "2.10"):
        yield warn(
            "aotriton_nan", "Attention of torch 2.9 gives NaN on gfx1100",
            f"torch {torch} brings AOTriton 0.11b, with which attention on gfx1100 was reported to give NaN; without "
            "its experimental flag, attention takes the slow math path", f"use torch 2.10 or newer: {_REINSTALL}",
            "aotriton#123; pytorch#166397",
        )  # fmt: skip


def _compiler(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software.build != "rocm" or software.packages.get("triton") is None:
        return
    source, missing = "triton driver.c: compiled at the first launch", software.missing_for_triton
    if missing:
        what, _, package = missing.rpartition(": install ")
        yield warn(
            "triton_cannot_compile", "Triton cannot start",
            f"{what or missing}. Triton compiles a C file against Python's headers when its first kernel starts on "
            "ROCm: without them, every Triton kernel fails (digests on the card and TRL's fused loss), and slower ones "
            "are used where there are any",
            f"install {package or 'gcc and python3-dev'}, for example `sudo apt install gcc python3-dev`", source,
        )  # fmt: skip
    else:
        yield ok("compiler_ok", "C compiler and Python.h", "Triton's driver can be compiled", source)


def _allocator(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software.torch_version is None or software.build == "cpu":
        return
    if software.allocator_settings is None:
        yield unknown(software.problems.get("allocator_settings", "torch does not report its allocator's settings"))
    else:
        settings = software.allocator_settings or "the defaults"
        yield ok(
            "allocator", "allocator: " + settings, "reported by torch after reading all *_ALLOC_CONF variables",
            "torch CUDAAllocatorConfig.h",
        )  # fmt: skip


def _bitsandbytes(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    version, files = software.packages.get("bitsandbytes"), software.bitsandbytes_libraries
    install, forced = f'`pip install -U "bitsandbytes>={_LEAST_BITSANDBYTES}"`', evidence.environ.get(_FORCING)
    if version is None:
        text = software.problems.get("bitsandbytes") or (
            "4-bit and 8-bit weights and 8-bit optimizers are not available; LoRA in bf16 works"
        )
        yield note(
            "bnb_missing", "bitsandbytes is not installed", text, f"{install} for QLoRA",
            "bitsandbytes installation page",
        )  # fmt: skip
        return
    if software.build != "rocm":
        yield skipped(_NO_ROCM_BUILD)
        return
    if within(version, None, _LEAST_BITSANDBYTES) and any(
        (gpu.arch or "").startswith(_WAVE32) for gpu in evidence.candidates
    ):
        yield fail(
            "bnb_old", f"bitsandbytes {version} computes wrongly on this card",
            "below 0.50.0, NaN in 4-bit were reported on ROCm, and blocks of 64 were wrong on RDNA, whose wavefronts "
            "have another size than assumed", install,
            "unsloth#7535; bitsandbytes#1885; bitsandbytes#1979; bitsandbytes#2012",
        )  # fmt: skip
    if forced is not None:
        yield unknown(f"{_FORCING}={forced} chooses the library, whatever torch's build; only a measurement tells")
        return
    hip = version_numbers(software.hip_version or "")
    if hip is None or not files:
        yield unknown(
            f"bitsandbytes has no native library, or torch's version of HIP is no version ({software.hip_version})"
        )
        return
    # Version of HIP to file; ``rocm715`` is 7.15. The loader of 0.50 (cextension.py) takes the exact one, the nearest
    # older, the nearest newer, never one of another major version.
    available = dict(
        sorted({(int(m[1]), int(m[2])): name for name in files if (m := _LIBRARY.fullmatch(name))}.items())
    )
    same = [one for one in available if one[0] == hip[0]]
    older, newer = [one for one in same if one <= hip[:2]], [one for one in same if one > hip[:2]]
    taken = older[-1] if older else newer[0] if newer else None
    listed, source = (
        ", ".join(f"{major}.{small}" for major, small in available) or "no ROCm at all",
        "bitsandbytes cextension.py",
    )
    seen = [f"torch.version.hip: {software.hip_version}", f"ROCm libraries: {', '.join(available.values()) or 'none'}"]
    title = f"bitsandbytes {version}"
    if taken is None:
        yield warn(
            "bnb_no_library", f"{title} has no library for this build",
            f"torch is built with HIP {minor(software.hip_version or '')}; bitsandbytes has libraries for {listed}, "
            "and does not load one of another major version, so --load_in_4bit and --load_in_8bit cannot work",
            f"use a torch build with one of {listed}, or train without quantisation; BNB_ROCM_VERSION forces a "
            "library (not tried by this project)", source, read=seen,
        )  # fmt: skip
    elif taken == (6, 4) and any(gpu.arch == "gfx1100" for gpu in evidence.candidates):
        yield warn(
            "bnb_rocm64", "4-bit products were reported wrong with this library on gfx1100",
            f"bitsandbytes {version} loads {available[taken]} here. With that library, in 0.50.3.dev0, two owners of "
            "gfx1100 cards got wrong products of 4-bit weights, while quantisation and dequantisation were correct; "
            "the machine code of 0.50.2's, executed by this project's interpreter, is 12 per cent off, too",
            "run `hf-rocm-tune doctor --only nf4` before you train in 4-bit, or use a torch build with ROCm 7.2, "
            "which loads another library", "bitsandbytes#2087; bitsandbytes#2089", read=seen,
        )  # fmt: skip
    elif taken == hip[:2]:
        yield ok(
            "bnb_library", title, f"loads {available[taken]}, which is for torch's version of HIP", source, read=seen,
        )  # fmt: skip
    else:
        text = (
            f"torch is built with HIP {minor(software.hip_version or '')}; bitsandbytes {version} has no library for "
            f"that, and loads {available[taken]}, which it allows within one major version"
        )
        yield note(
            "bnb_nearest", f"{title} loads a library for another minor version", text,
            f"nothing if the measured check of NF4 passes; else a torch build with one of {listed}", source, read=seen,
        )  # fmt: skip


def _tested(evidence: Evidence) -> Iterator[Finding]:
    found = [finding for package, tested in TESTED.items() for finding in _version(evidence, package, tested)]
    yield from found
    if not found:
        have = {package: evidence.software.packages.get(package) for package in TESTED}
        seen = [", ".join(f"{package} {version}" for package, version in have.items() if version)]
        yield ok(
            "versions_tested", "tested library versions", "or newer within the same major version", _OURS, read=seen,
        )  # fmt: skip


def _version(evidence: Evidence, package: str, tested: str) -> Iterator[Finding]:
    software = evidence.software
    version, problem = software.packages.get(package), software.problems.get(package)
    have, want = version_numbers(version or ""), version_numbers(tested) or ()
    if version is None and not problem:
        if package not in ("bitsandbytes", "torch"):  # those have their own checks
            yield fail(
                "version_missing", f"{package} is not installed", "training needs it",
                f'`pip install "{package}>={tested}"`', _OURS, subject=package,
            )  # fmt: skip
    elif have is None:
        yield unknown(problem or f"the version of {package} is {version!r}, which is not a version", subject=package)
    elif have < want:
        # Without an index, pip would replace a ROCm build by one for another vendor.
        rocm = package == "torch" and (torch_rocm(software) or evidence.cards)
        text = (
            f"{package} {version} is installed; this project was tested with {tested} and newer, and uses private "
            "functions of its upstream libraries"
        )
        fix = f'`pip install "{package}=={tested}" {_INDEX}`' if rocm else f'`pip install -U "{package}>={tested}"`'
        yield warn(
            "version_older", f"{package} {version} is older than what was tested", text, fix, _OURS, subject=package,
        )  # fmt: skip
    elif have[0] > want[0]:
        text = (
            f"{package} {version} is installed; this project was tested with {tested}. If a private function was "
            "moved, a run ends with a clear error"
        )
        yield note(
            "version_newer", f"{package} {version} is a newer major version than tested", text,
            f'nothing while runs start; else `pip install "{package}=={tested}"`', _OURS, subject=package,
        )  # fmt: skip


CHECKS = (
    Check("torch", "software", "torch's build and its devices", _torch),
    Check("arch", "software", "torch's code for every card", _architectures),
    Check("rocm", "software", "the version of ROCm inside torch, and reports against it", _rocm),
    Check("compiler", "software", "the C compiler and Python.h that Triton needs", _compiler),
    Check("allocator", "software", "the settings of torch's allocator", _allocator),
    Check("bitsandbytes", "software", "which library of bitsandbytes is loaded", _bitsandbytes),
    Check("versions", "software", "installed and tested versions of the libraries", _tested),
)
