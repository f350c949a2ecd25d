"""bitsandbytes, and the versions of the libraries against those that were tested."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.checks.torch_build import NO_ROCM_BUILD
from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.doctor.finding import Finding, from_row, skipped, unknown
from hf_rocm_tune.doctor.versions import known_versions, minor, numbers, torch_rocm, within
from hf_rocm_tune.machine.software import Software

_FORCING = "BNB_ROCM_VERSION"  # read by bitsandbytes, cextension.py
_LIBRARY = re.compile(r"libbitsandbytes_rocm([0-9])([0-9]{1,2})\.(?:so|dll)")
# RDNA: what was wrong in old versions was wrong with its wavefronts.
_WAVE32 = ("gfx10", "gfx11", "gfx12")
_ROCM_INDEX = " --index-url https://download.pytorch.org/whl/rocm7.2"


def rocm_libraries(files: tuple[str, ...]) -> dict[tuple[int, int], str]:
    """Version of HIP to file, for the ROCm libraries of bitsandbytes; ``rocm715`` is 7.15 (its cextension.py)."""
    found = {(int(match[1]), int(match[2])): name for name in files if (match := _LIBRARY.fullmatch(name))}
    return dict(sorted(found.items()))


def chosen(available: Mapping[tuple[int, int], str], hip: tuple[int, int]) -> tuple[int, int] | None:
    """Which library the loader of bitsandbytes 0.50 takes: the exact one, the nearest older, the nearest newer.

    Never one of another major version.
    """
    same = sorted(version for version in available if version[0] == hip[0])
    older, newer = [one for one in same if one <= hip], [one for one in same if one > hip]
    return older[-1] if older else newer[0] if newer else None


def _bitsandbytes(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software is None:
        return
    least, version = known_versions()["bitsandbytes"]["least"], software.packages.get("bitsandbytes")
    if version is None:
        problem = software.package_problems.get("bitsandbytes")
        if problem:
            yield from_row("bitsandbytes", "bnb_unread", reason=problem, least=least)
        else:
            yield from_row("bitsandbytes", "bnb_missing", least=least)
        return
    if software.build != "rocm":
        yield skipped("bitsandbytes", NO_ROCM_BUILD)
        return
    if within(version, None, least) and any((gpu.arch or "").startswith(_WAVE32) for gpu in evidence.candidates):
        yield from_row("bitsandbytes", "bnb_old", version=version, least=least)
    files, forced = software.bitsandbytes_libraries, evidence.variables.get(_FORCING)
    if forced is not None:
        why = f"{_FORCING}={forced} chooses the library, whatever torch is built with; only a measurement tells its fit"
        yield unknown("bitsandbytes", why)
    elif files.value is None:
        yield from_row("bitsandbytes", "bnb_unread", reason=files.reason, least=least)
    else:
        yield from _library(evidence, software, version, rocm_libraries(files.value))


def _library(
    evidence: Evidence, software: Software, version: str, available: dict[tuple[int, int], str]
) -> Iterator[Finding]:
    hip = software.hip_version or ""
    wanted = numbers(hip)
    if wanted is None:
        yield unknown("bitsandbytes", f"torch's version of HIP is {hip!r}, which is no version")
        return
    taken = chosen(available, (wanted[0], wanted[1]))
    listed = ", ".join(f"{major}.{small}" for major, small in available) or "no ROCm at all"
    seen = [f"torch.version.hip: {hip}", f"ROCm libraries: {', '.join(available.values()) or 'none'}"]
    rocm = torch_rocm(software) or hip
    values = {"version": version, "hip": minor(hip)}
    if taken is None:
        yield from_row("bitsandbytes", "bnb_no_library", evidence=seen, available=listed, **values)
        return
    library = available[taken]
    if within(rocm, "10", None):
        yield from_row("bitsandbytes", "bnb_rocm10", evidence=seen, library=library, rocm=rocm, **values)
    elif taken == wanted[:2]:
        yield from_row("bitsandbytes", "bnb_library", evidence=seen, library=library, **values)
    else:
        yield from_row("bitsandbytes", "bnb_nearest", evidence=seen, library=library, available=listed, **values)
    known = known_versions()["bitsandbytes"]
    # Its kernel came with the version that is the least.
    wrong = [*taken] == known["wrong_on_gfx1100"] and not within(version, None, known["least"])
    if wrong and any(gpu.arch == "gfx1100" for gpu in evidence.candidates):
        yield from_row("bitsandbytes", "bnb_rocm64", version=version, library=library)


def _versions(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software is None:
        return
    clean = True
    for package, tested in known_versions()["tested"].items():
        version, problem = software.packages.get(package), software.package_problems.get(package)
        finding = _version(
            package, version, problem, tested, index=_index(evidence, software) if package == "torch" else ""
        )
        if finding is not None:
            clean = False
            yield finding
    if clean:
        have = {package: software.packages.get(package) for package in known_versions()["tested"]}
        seen = [f"{package} {version}" for package, version in have.items() if version]
        yield from_row("versions", "versions_tested", evidence=[", ".join(seen)])


def _index(evidence: Evidence, software: Software) -> str:
    """Where pip is to look: without it, a build for another vendor's cards would take the place of the ROCm build."""
    if evidence.machine.host.platform == "linux":
        return _ROCM_INDEX if torch_rocm(software) or evidence.cards else ""
    return " --index-url ADDRESS_OF_YOUR_WHEELS" if torch_rocm(software) else ""


def _version(package: str, version: str | None, problem: str | None, tested: str, *, index: str) -> Finding | None:
    if version is None:
        if problem:
            return unknown("versions", problem, subject=package)
        if package in ("bitsandbytes", "torch"):
            return None  # a check of its own speaks of it
        return from_row("versions", "version_missing", subject=package, package=package, tested=tested)
    values = {"package": package, "version": version, "tested": tested}
    have, want = numbers(version), numbers(tested)
    if have is None:
        return unknown("versions", f"the version of {package} is {version!r}, which is no version", subject=package)
    assert want is not None
    if have < want:
        return from_row("versions", "version_older", subject=package, index=index, **values)
    if have[0] > want[0]:
        return from_row("versions", "version_newer", subject=package, **values)
    return None


CHECKS = (
    Check(name="bitsandbytes", group="software", about="a library of bitsandbytes for this ROCm", run=_bitsandbytes),
    Check(name="versions", group="software", about="the libraries against the tested versions", run=_versions),
)
