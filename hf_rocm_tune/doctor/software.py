"""Checks of torch, Triton's compiler and bitsandbytes: whether their builds fit the machine, this project and each
other."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from hf_rocm_tune.doctor.findings import Check, Evidence, Finding, fail, note, ok, unknown, warn
from hf_rocm_tune.doctor.system import in_wheels
from hf_rocm_tune.machine.process import FILTERS
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.sysfs import Files
from hf_rocm_tune.machine.torchvision import install
from hf_rocm_tune.upstream import LEFT_OUT, TESTED

_FORCING = "BNB_ROCM_VERSION"  # read by bitsandbytes, cextension.py
_LIBRARY = re.compile(r"libbitsandbytes_rocm([0-9])([0-9]{1,2})\.(?:so|dll)")
_INDEX = "--index-url https://download.pytorch.org/whl/rocm7.2"
_VERSIONS = "PyTorch: previous versions"
_OURS = "this project: pyproject.toml"
# Versions below which results on this card were reported wrong, how, and where.
_HARMFUL = {
    "torch": ("2.10", "gfx11", "attention of torch 2.9 gives NaN on gfx1100 (AOTriton 0.11b), and older ones have no "
              "fused one", "aotriton#123; pytorch#166397"),
    "bitsandbytes": ("0.50.0", "gfx", "below 0.50.0, NaN in 4-bit were reported on ROCm, and wrong blocks of 64 on "
                     "RDNA",
                     "unsloth#7535; bitsandbytes#1885; bitsandbytes#1979; bitsandbytes#2012"),
}  # fmt: skip


_MULTI_ARCH = Version("7.13")
"""The ROCm from which on AMD's index has one torch with kernels in separate wheels."""
_FAMILIES = ("gfx11", "gfx12")
"""Architectures whose attention kernels (AOTriton) are in a wheel of their family, such as amd-torch-device-gfx110x."""
_RDNA2 = re.compile("gfx103[0-9]")
"""They all have gfx1030's instructions (LLVM: gfx10-3-generic)."""


def requirements() -> dict[str, Requirement]:
    """What this package requires, by import name; its lower bounds are the versions that it is tested with.

    Empty where the package is run without having been installed.
    """
    try:
        stated = map(Requirement, metadata.requires("hf-rocm-tune") or ())
    except metadata.PackageNotFoundError:
        return {}
    plain = [requirement for requirement in stated if requirement.marker is None]
    return {requirement.name.replace("-", "_"): requirement for requirement in plain}


def _install(name: str) -> str:
    wanted = str(requirements().get(name, name))
    if name in TESTED:
        oldest, newest = TESTED[name]
        wanted = f"{name}>={oldest},<={newest}"
    command = f'pip install "{wanted}"'
    if name == "torch":  # without an index, pip would replace a ROCm build by one for another vendor
        command += f" --force-reinstall {_INDEX}"
    return f"`{command}`"


def _version(text: str | None) -> Version | None:
    try:
        return Version(text or "")
    except InvalidVersion:
        return None


def _torch(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    version = software.torch_version
    known = []  # the AMD GPUs that torch should compute on
    for gpu in evidence.candidates:
        if in_wheels(gpu):
            known.append(gpu.card.name if gpu.card else f"an AMD {gpu.arch or 'GPU'}")
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
    seen = []
    for device in software.devices:
        seen.append(f"{device.name} ({device.arch}, {device.total_bytes / (1 << 30):.1f} GiB)")
    text = f"a ROCm build (HIP {software.hip_version}); it sees {', '.join(seen)}"
    yield ok("torch_rocm", f"torch {version}", text, "pytorch hip.rst")
    known = [gpu for _, gpu in evidence.joined if gpu is not None]
    cards = [gpu for gpu in known if gpu in evidence.cards]
    if len(cards) < len(evidence.cards) and len(known) == len(software.devices):
        why = f": {filters} is set" if filters else ""
        yield note("torch_sees_fewer", f"torch sees {len(cards)} of {len(evidence.cards)} cards",
                   f"not all discrete cards are visible to torch{why}",
                   "change or unset the filter to train on all of them", "HIP environment variables page")  # fmt: skip


def _architectures(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    true = evidence.archs
    cards = {gpu.address for gpu in evidence.cards}
    if not (evidence.candidates or evidence.devices) or software.build != "rocm":
        return
    for device, gpu in evidence.joined:
        related = gpu is not None and _RDNA2.fullmatch(gpu.arch or "") and device.arch == "gfx1030"
        if gpu is not None and gpu.node is not None and gpu.node.arch != device.arch and not related:
            yield fail("arch_spoofed", "torch reports another architecture than the card's",
                       f"{gpu.address} is {gpu.arch} in the kernel's list, and {device.arch} in torch's: code for the "
                       "wrong one crashes or gives wrong results",
                       "unset HSA_OVERRIDE_GFX_VERSION and its per-node forms",
                       "libhsakmt topology.c; TheRock#5543; unsloth install.sh", gpu.address)  # fmt: skip
    built = software.arch_list
    if not built or not true:
        yield unknown(software.problems.get("arch_list", "the architectures of torch or of the GPUs are unknown"))
        return
    wheels = software.rocm_wheels
    listed_wheels = [f"{name} {version}" for name, version in wheels.items()]
    rocm = _multi_arch(software)
    for address, arch in true.items():
        missing = _missing_wheels(arch, wheels) if rocm else []
        overridden = any(gpu is not None and gpu.address == address and device.arch == "gfx1030"
                         for device, gpu in evidence.joined)  # fmt: skip
        if arch not in built and address in cards and _RDNA2.fullmatch(arch) and "gfx1030" in built:
            text = f"{address} is {arch}, and this build has code for gfx1030, whose instructions {arch} has"
            if overridden:
                yield note("arch_related", f"{arch} runs gfx1030's code", f"{text}. AMD does not support it",
                           "nothing to do", "LLVM AMDGPUUsage; legacy-rocm-build#1698", address)  # fmt: skip
                continue
            yield fail("arch_related_missing", f"torch has no code for {arch}", f"{text}: it runs only if told to",
                       "`export HSA_OVERRIDE_GFX_VERSION=10.3.0`, with no GPU of another generation visible "
                       "(HIP_VISIBLE_DEVICES); AMD does not support it, and owners report that it works",
                       "LLVM AMDGPUUsage; legacy-rocm-build#1698", address)  # fmt: skip
        elif arch not in built:
            yield fail("arch_missing", f"torch has no code for {arch}",
                       f"{address} is {arch}, and this build has {' '.join(built)}: the first kernel fails",
                       f"install a wheel with {arch}: those of download.pytorch.org have gfx1100 from rocm6.0 on, "
                       "those of repo.amd.com/rocm one index or extra for each; do not set HSA_OVERRIDE_GFX_VERSION",
                       "uv#18730; TheRock#5543; TheRock RELEASES.md", address)  # fmt: skip
        elif missing:
            verb = "are" if len(missing) > 1 else "is"
            yield fail("device_wheel_missing", f"torch's kernels for {arch} are not installed",
                       f"this is a multi-architecture build of ROCm {rocm} with kernels in separate wheels, of which "
                       f"{' and '.join(missing)} {verb} missing: torch lists the card, "
                       "and its first kernel fails (hipErrorInvalidImage)",
                       f"install `torch[device-{arch}]` and `rocm[device-{arch}]` of the same versions from the same "
                       "index", "TheRock RELEASES.md; uv#21683; TheRock#6997; TheRock#6869", address,
                       listed_wheels)  # fmt: skip
        elif rocm and arch.startswith(_FAMILIES) and not _family_wheels(arch, wheels):
            yield warn("family_wheel_missing", f"attention kernels for {arch} are not installed",
                       f"a multi-architecture build of ROCm {rocm} has them in a wheel of {arch}'s family, such as "
                       f"amd-torch-device-{arch[:-1]}x, and none is there: fused attention fails or is not used",
                       f"install `torch[device-{arch}]` again from the same index, or the wheel of the family by name",
                       "pytorch#194498; TheRock#7839; TheRock#6223", address, listed_wheels)  # fmt: skip
        else:
            yield ok("arch_ok", f"code for {arch}", f"this build has {' '.join(built)}", "uv#18730")


def _multi_arch(software: Software) -> Version | None:
    """ROCm's version where kernels are in wheels of each architecture; None for wheels of one family, or no wheels."""
    wheels = software.rocm_wheels
    stated = next((wheels[name] for name in ("rocm-sdk-core", "rocm", "rocm-sdk-libraries") if name in wheels), None)
    rocm = _version(stated or (software.torch_version or "").partition("+rocm")[2])
    apart = any("-device-" in name for name in wheels) or not any("gfx" in name for name in wheels)
    if not wheels or not apart or rocm is None or rocm.release < _MULTI_ARCH.release:
        return None
    return rocm


def _missing_wheels(arch: str, wheels: Collection[str]) -> list[str]:
    return [name for name in (f"amd-torch-device-{arch}", f"rocm-sdk-device-{arch}") if name not in wheels]


def _family_wheels(arch: str, wheels: Collection[str]) -> list[str]:
    """Wheels of torch's kernels for a family with this architecture: ``gfx11``, ``gfx110x``, ``gfx12-0`` ..."""
    prefix = "amd-torch-device-"
    of_family = []
    for name in wheels:
        if not name.startswith(prefix):
            continue
        stem = re.sub("-?all$|x$|-", "", name.removeprefix(prefix))
        if stem != arch and arch.startswith(stem) and len(stem) >= 5:
            of_family.append(name)
    return of_family


def _libraries(evidence: Evidence) -> Iterator[Finding]:
    """ROCm libraries in LD_LIBRARY_PATH, which the loader takes before those of torch's own wheels."""
    software = evidence.software
    variable = "LD_LIBRARY_PATH"
    if software.build != "rocm":
        return
    own = _rocm_of(software)
    wrong = {}
    unclear = []
    for part in evidence.environ.get(variable, "").split(":"):
        if not re.search("(^|/)rocm", part):
            continue
        version = _rocm_at(part, Files(evidence.root))
        if not version or not own:
            unclear.append(part)
        elif version[:2] != own[:2]:
            wrong[part] = version
    source = "TheRock#1011; ld.so(8)"
    if wrong:
        named = ", ".join(f"{part} (ROCm {version[0]}.{version[1]})" for part, version in wrong.items())
        yield warn("other_rocm", f"{variable} has another ROCm",
                   f"the loader takes libraries from {named} before those that torch was built with (ROCm "
                   f"{own[0]}.{own[1]}): crashes, missing symbols and cards that are not found were reported",
                   f"unset {variable}, or leave its ROCm directories out, where torch is started",
                   source, variable)  # fmt: skip
    elif unclear:
        yield note("some_rocm", f"{variable} has a ROCm of unknown version",
                   f"{', '.join(unclear)} comes before the libraries of torch's own wheels",
                   f"unset {variable} if torch sees no GPU or crashes", source, variable)  # fmt: skip


def _rocm_of(software: Software) -> tuple[int, ...]:
    """The ROCm that torch was built with: of its local version, of its wheels, or of HIP before they differ."""
    stated = (software.torch_version or "").partition("+rocm")[2] or software.rocm_wheels.get("rocm-sdk-core", "")
    version = _version(stated)
    hip = _version(software.hip_version)
    if version is None and hip is not None and hip.release[:2] < _MULTI_ARCH.release:
        version = hip
    if version is None or len(version.release) < 2:
        return ()
    return version.release


def _rocm_at(directory: str, files: Files) -> tuple[int, ...]:
    """The ROCm that a directory of libraries belongs to, by its name or by what it states; empty: unknown."""
    named = re.search(r"rocm-([0-9]{1,3})\.([0-9]{1,3})", directory)
    if named is None:
        root = re.sub("/lib(64)?/*$", "", directory).strip("/")
        named = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", files.text(f"{root}/.info/version") or "")
    return (int(named[1]), int(named[2])) if named else ()


def _training_resets(evidence: Evidence) -> Iterator[Finding]:
    """RDNA4 cards, which AMD and owners report to reset in fine-tuning with hipBLASLt."""
    software = evidence.software
    variable = "TORCH_BLAS_PREFER_HIPBLASLT"
    affected = any(arch.startswith("gfx120") for arch in evidence.archs.values())
    hip = _version(software.hip_version)
    if software.build != "rocm" or not affected or hip is None or hip.release[:2] < (7, 2):
        return
    source = "TheRock#7699; legacy-rocm-build#6413; rocm-libraries#7992"
    if evidence.environ.get(variable) == "0":
        yield ok("hipblaslt_off", "hipBLASLt is off", f"{variable}=0: resets in training were reported with it", source)
        return
    yield warn("hipblaslt_resets", "Resets in training were reported for this card",
               "with hipBLASLt of ROCm 7.2 and later, AMD and owners report page faults and GPU resets in LoRA and "
               "QLoRA training on RX 9070 and R9700 cards",
               f"`export {variable}=0`: products are computed by rocBLAS, more slowly", source)  # fmt: skip


def _compiler(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software.build != "rocm" or software.packages.get("triton") is None:
        return
    source = "triton driver.c: compiled at the first launch"
    missing = software.missing_for_triton
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
    software = evidence.software
    source = "bitsandbytes cextension.py"
    version = software.packages.get("bitsandbytes")
    forced = evidence.environ.get(_FORCING)
    hip = _version(software.hip_version)
    title = f"bitsandbytes {version}"
    # Version of HIP and file; ``rocm715`` is 7.15. The loader of 0.50 (cextension.py) takes the exact one, the nearest
    # older, the nearest newer, never one of another major version.
    libraries = []
    for match in filter(None, map(_LIBRARY.fullmatch, software.bitsandbytes_libraries)):
        libraries.append(((int(match[1]), int(match[2])), match[0]))
    libraries.sort()
    same = [((major, minor), file) for (major, minor), file in libraries if hip and major == hip.major]
    if version is None:
        yield note("bnb_missing", "bitsandbytes is not installed",
                   "4-bit and 8-bit weights and 8-bit optimizers are not available; LoRA in bf16 works",
                   f"{_install('bitsandbytes')} for QLoRA", "bitsandbytes installation page")  # fmt: skip
    elif software.build != "rocm":
        return
    elif forced is not None:
        files = [file for _, file in libraries]
        wanted = f"libbitsandbytes_rocm{forced}"
        file = next((name for name in files if name.rpartition(".")[0] == wanted), None)
        if file is None:
            listed = ", ".join(sorted(re.sub(r"^.*rocm|\..*$", "", name) for name in files)) or "no ROCm at all"
            yield warn("bnb_forced_missing", f"{_FORCING} names a library that is not there",
                       f"{_FORCING}={forced} makes {title} load {wanted}.so, and it has those for {listed}: every "
                       "4-bit and 8-bit call raises an error",
                       f"`unset {_FORCING}`", source)  # fmt: skip
        elif file not in {name for _, name in same}:
            yield warn("bnb_forced_other", f"{_FORCING} names a library for another HIP",
                       f"{title} loads {file}, and torch is built with HIP {hip}: it needs libraries of another major "
                       "version, and does not load without them",
                       f"`unset {_FORCING}`", source)  # fmt: skip
        else:
            yield ok("bnb_library", title, f"{_FORCING}={forced} makes it load {file} for HIP {hip}", source)
    elif hip is None or not software.bitsandbytes_libraries:
        yield unknown(f"bitsandbytes has no native library, or HIP {software.hip_version} is no version")
    elif not same:
        listed = ", ".join(f"{major}.{minor}" for (major, minor), _ in libraries) or "no ROCm at all"
        yield warn("bnb_no_library", f"{title} has no library for this build",
                   f"torch is built with HIP {hip}; bitsandbytes has libraries for {listed}, and does not load one of "
                   "another major version, so --load_in_4bit and --load_in_8bit cannot work",
                   f"use a torch build with one of {listed}, or train without quantisation", source)  # fmt: skip
    else:
        taken, file = same[0]
        for of_hip, name in same:
            if of_hip <= (hip.major, hip.minor):
                taken, file = of_hip, name
        if taken == (6, 4) and "gfx1100" in evidence.archs.values():
            yield warn("bnb_rocm64", "4-bit products were reported wrong with this library on gfx1100",
                       f"{title} loads {file} here. Two owners of gfx1100 cards got wrong products of 4-bit weights "
                       "with it; its machine code, executed by this project's interpreter, is 12 per cent off",
                       "use a torch build with ROCm 7.2, which loads another; `doctor --only nf4` tests it",
                       "bitsandbytes#2087; bitsandbytes#2089")  # fmt: skip
        else:
            yield ok("bnb_library", title, f"for HIP {hip} it loads {file}", source)


def _torchvision(evidence: Evidence) -> Iterator[Finding]:
    """A torchvision that is built for another torch, which every library that finds it fails to import."""
    software = evidence.software
    source = "vision#8985; pytorch#122494"
    if software.torchvision is None or software.torch_version is None:
        return
    title = f"torchvision {software.torchvision}"
    if software.torchvision_problem:
        yield fail("torchvision_misfit", "torchvision does not fit torch",
                   f"{title} cannot be imported beside torch {software.torch_version} "
                   f"({software.torchvision_problem}): runs of text hide it, processors of pictures fail",
                   install(software.torch_version), source)  # fmt: skip
    else:
        yield ok("torchvision_ok", title, f"it fits torch {software.torch_version}", source)


def _tested(evidence: Evidence) -> Iterator[Finding]:
    packages = evidence.software.packages
    wanted = {name: requirement for name, requirement in requirements().items() if name in packages}
    right = bool(wanted)
    if not wanted:
        yield unknown("hf-rocm-tune is not installed, so what it requires is not known")
    for name, required in wanted.items():
        text = packages[name]
        version = _version(text)
        below, archs, harm, source = _HARMFUL.get(name, ("0", "gfx", "", ""))
        tested = TESTED.get(name)
        if text is None and name in ("bitsandbytes", "torch"):  # those have their own checks
            continue
        if text is None:
            right = False
            yield fail("version_missing", f"{name} is not installed", "training needs it", _install(name), _OURS, name)
        elif version is None or not _is_wanted(required, version, tested):
            right = False
            known = evidence.archs.values()
            affected = not known or any(arch.startswith(archs) for arch in known)
            harmful = harm and version and version.release < Version(below).release and affected
            harmful = harmful and evidence.software.build == "rocm"
            range_ = " to ".join(tested) if tested else str(required.specifier)
            title = f"{name} {text} is not a version that was tested"
            why = f"this project is tested with {range_}, and uses private functions of its upstream libraries"
            if harmful:
                sources = f"{_OURS}; {source}"
                yield fail("version_untested", title, f"{why}; {harm}", _install(name), sources, name)
            else:
                yield warn("version_untested", title, why, _install(name), _OURS, name)
        elif tested and version.release > Version(tested[1]).release:
            right = False
            yield note("version_newer", f"{name} {text} is newer than the tested versions",
                       f"this project is tested with {' to '.join(tested)}; a private function that has moved is an "
                       "error before the first step, never a result",
                       "nothing to do; if a run stops with such an error, install a tested version",
                       _OURS, name)  # fmt: skip
        elif version.is_prerelease:
            right = False
            yield note("version_prerelease", f"{name} {text} is a pre-release",
                       "this project is tested with released versions",
                       "nothing to do; install the release if something fails", _OURS, name)  # fmt: skip
    if right:
        seen = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        yield ok("versions_tested", "tested library versions", seen, _OURS)


def _is_wanted(required: Requirement, version: Version, tested: tuple[str, str] | None) -> bool:
    """Whether a version, or the release that a pre-release becomes, is not older than those that were tested."""
    release = Version(version.base_version)
    if tested is None:
        return required.specifier.contains(release, prereleases=True)
    return release >= Version(tested[0]) and release not in LEFT_OUT.get(required.name, ())


CHECKS = (
    Check("torch", "software", "torch's build and its devices", _torch),
    Check("arch", "software", "torch's code for every card", _architectures),
    Check("libraries", "software", "another ROCm in LD_LIBRARY_PATH", _libraries),
    Check("training_resets", "software", "RDNA4 cards and hipBLASLt", _training_resets),
    Check("compiler", "software", "the C compiler and Python.h that Triton needs", _compiler),
    Check("bitsandbytes", "software", "which library of bitsandbytes is loaded", _bitsandbytes),
    Check("torchvision", "software", "whether torchvision fits torch", _torchvision),
    Check("versions", "software", "installed and tested versions of the libraries", _tested),
)
