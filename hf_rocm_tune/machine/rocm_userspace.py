"""Which ROCm user space is installed: the system's, and that of Python wheels. Nothing here imports torch.

A ROCm build of torch brings its own user space (inside the wheel, or as the ``rocm-sdk-*`` wheels of TheRock), so the
system's one may be of another version, or missing, without harm; what builds or loads from ``/opt/rocm`` uses that.

Sources: rocm-core writes ``/opt/rocm/.info/version`` (``7.2.4``, or ``6.4.0-47`` with a build number); the packages of
the TheRock stream have it as ``/opt/rocm/core/.info/version`` (reported by owners of 7.14 and 10.0). Wheels: TheRock,
docs/packaging/python_packaging.md. ``hipconfig --version`` is not asked: it gives HIP's version, and ROCm 10.0 comes
with HIP 7.15 (reported: torch 2.13.0+rocm10.0.0 has ``torch.version.hip`` 7.15.26333).
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from hf_rocm_tune.machine.sysfs import Reading, read_text

VERSION_FILES = ("opt/rocm/.info/version", "opt/rocm/core/.info/version")
_VERSION = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6}){1,3}([-.+~]?[0-9A-Za-z.+~-]{0,60})?")
_WHEELS = re.compile(r"rocm|rocm-sdk(-.*)?|amd-torch-device-.*")


def read_rocm_version(root: Path = Path("/")) -> Reading[str]:
    """Version of the ROCm that is installed in the system, without a build number: ``7.2.4``.

    Args:
        root: what stands for ``/``.
    """
    reasons = []
    for path in VERSION_FILES:
        text = read_text(root, path)
        if text.value is None:
            reasons.append(text.reason)
        elif _VERSION.fullmatch(text.value):
            return Reading(value=text.value.partition("-")[0])
        else:
            reasons.append(f"/{path}: not a version: {text.value[:40]!r}")
    return Reading(value=None, reason="; ".join(reasons))


def rocm_wheels() -> dict[str, str]:
    """Installed Python distributions that carry ROCm itself or kernels for one architecture, with their versions.

    ``rocm-sdk-device-gfx1100`` and ``amd-torch-device-gfx1100`` are what a multi-architecture torch wheel needs beside
    it. A distribution whose metadata cannot be read is left out.
    """
    found = {}
    for distribution in metadata.distributions():
        try:
            told = distribution.metadata  # each access parses the file
            name, version = told["Name"], told["Version"]
        except (OSError, ValueError, KeyError):
            continue
        plain = re.sub(r"[-_.]+", "-", name).lower() if isinstance(name, str) else ""
        if _WHEELS.fullmatch(plain) and isinstance(version, str):
            found[plain] = version
    return dict(sorted(found.items()))
