"""What the variable policy needs to know of this installation, read as text: nothing here imports torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What rows may depend on. Unknown is None with an entry in ``reasons``, keyed by the field's name.

    Attributes:
        torch_version: for example ``2.13.0+cpu``.
        hip_version: of torch's build, for example ``7.2.26015``; None without a reason means: not a ROCm build.
        archs: visible GPUs' architectures in order, one entry a GPU.
        flash_attn_version: None without a reason means: not installed.
        findings: what checks on this machine have found, for example ``peer_copy_failed``.
        reasons: field name to one line that says why it is unknown.
    """

    torch_version: str | None
    hip_version: str | None
    archs: tuple[str, ...] | None
    flash_attn_version: str | None = None
    findings: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("torch_version", "archs"):
            assert getattr(self, name) is not None or name in self.reasons, f"{name} is unknown without a reason"

    @property
    def is_rocm(self) -> bool | None:
        """Whether torch is a ROCm build; None where that could not be read."""
        if self.hip_version is not None:
            return True
        return None if "hip_version" in self.reasons else False


def _package_text(package: str, file: str) -> str | None:
    """Text of a file of an installed package, without importing it; None where the package is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a half-made module in sys.modules has no spec
        spec = None
    if spec is None or not spec.origin:
        return None
    return (Path(spec.origin).parent / file).read_text("utf-8", errors="replace")


def _quoted(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def read_facts(*, archs: tuple[str, ...] | None = None) -> MachineFacts:
    """Read what this process needs to know of torch and flash-attn, importing neither.

    Args:
        archs: architectures of the visible GPUs, from ``hardware``; None where they were not read.
    """
    reasons: dict[str, str] = {} if archs is not None else {"archs": "the visible GPUs were not read"}
    torch_version = hip_version = None
    try:
        text = _package_text("torch", "version.py")
        problem = "torch is not installed" if text is None else ""
    except OSError as error:
        text, problem = None, f"torch/version.py: {error.strerror}"
    if text is not None:
        torch_version, hip_version = _quoted(text, "__version__"), _quoted(text, "hip")
        if torch_version is None or not re.search(r"^hip\b", text, re.MULTILINE):
            problem = "torch/version.py has another form than expected"
    if torch_version is None:
        reasons["torch_version"] = problem
    if problem and hip_version is None:
        reasons["hip_version"] = problem
    try:
        flash_attn = _quoted(_package_text("flash_attn", "__init__.py") or "", "__version__")
    except OSError as error:
        flash_attn, reasons["flash_attn_version"] = None, f"flash_attn: {error.strerror}"
    return MachineFacts(
        torch_version=torch_version,
        hip_version=hip_version,
        archs=archs,
        flash_attn_version=flash_attn,
        reasons=reasons,
    )
