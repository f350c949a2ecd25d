"""Versions as numbers, and what the knowledge says of them."""

from __future__ import annotations

import re
from typing import Any

from hf_rocm_tune.doctor.rows import knowledge_data
from hf_rocm_tune.machine.software import Software

_LEADING = re.compile(r"\s*([0-9]+(?:\.[0-9]+)*)")
_ROCM_IN_TORCH = re.compile(r"\+rocm([0-9]+(?:\.[0-9]+)*)")
_PARTS = 4


def numbers(version: str) -> tuple[int, ...] | None:
    """``2.13.0+rocm7.2`` as (2, 13, 0, 0), padded so that equal versions compare equal; None where it is no version."""
    match = _LEADING.match(version)
    if match is None:
        return None
    parts = [int(part) for part in match.group(1).split(".")[:_PARTS]]
    return tuple(parts + [0] * (_PARTS - len(parts)))


def within(version: str, low: str | None, high: str | None) -> bool:
    """Whether ``low <= version < high``; an open end is None, and what is no version is in no range."""
    value = numbers(version)
    if value is None:
        return False
    ends = (numbers(low) if low else None, numbers(high) if high else None)
    return (ends[0] is None or value >= ends[0]) and (ends[1] is None or value < ends[1])


def minor(version: str) -> str:
    """``7.2.26015`` as ``7.2``."""
    value = numbers(version)
    return version if value is None else f"{value[0]}.{value[1]}"


def torch_rocm(software: Software) -> str | None:
    """The version of ROCm inside torch; None where it is no ROCm build.

    From ROCm 10 on, HIP's version is another number (10.0 comes with HIP 7.15), so it is only the last resort.
    """
    if not software.hip_version:
        return None
    named = _ROCM_IN_TORCH.search(software.torch_version.value or "")
    return software.torch_rocm_version or (named.group(1) if named else software.hip_version)


def known_versions() -> dict[str, Any]:
    """``knowledge/versions.toml``."""
    return knowledge_data("versions.toml")
