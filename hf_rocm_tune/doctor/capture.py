"""A machine as a file: written here without names and secrets, diagnosed elsewhere.

The file is the recording of the machine (``hardware.sysfs_recording`` says its form) with the doctor's own sections::

    {"schema": 1, "source": "hf-rocm-tune 0.1.0", ..., "software": {...}, "environ": {"HIP_VISIBLE_DEVICES": "0"}}

``software`` is ``Software.to_dict()``; ``environ`` holds variables of the policy only. Where one is missing, what hangs
on it is unknown.
"""

from __future__ import annotations

import base64
import fnmatch
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.doctor.redact import Identity, scrub, scrub_variable, without_groups
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.machine.host import PACKED_CONFIG
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.survey import survey
from hf_rocm_tune.machine.sysfs import RecordedTree
from hf_rocm_tune.machine.variables import POLICY
from hf_rocm_tune.machine.visible import FILTERS
from hf_rocm_tune.version import __version__

MAX_BYTES = 32 << 20
_NO_TEXT = base64.b64encode(b"\0\0\0\0").decode()


def of_policy(environ: Mapping[str, str]) -> dict[str, str]:
    """Those variables that the policy says something about, and the filters of visible devices."""
    patterns = {*FILTERS, *(pattern for row in POLICY for pattern in row.variables)}
    return {
        name: value
        for name, value in sorted(environ.items())
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def pack(evidence: Evidence, recording: Mapping[str, Any], identity: Identity) -> dict[str, Any]:
    """What goes into the file.

    Args:
        evidence: of this machine.
        recording: of what was read for it.
        identity: the names that must not be in it.
    """
    software = evidence.software.to_dict() if evidence.software else {}
    packed: dict[str, Any] = scrub({**without_groups(recording), "software": software, "binary": {}}, identity)
    packed["source"] = f"hf-rocm-tune {__version__}, doctor --capture"
    packed["binary"] = {scrub(path, identity): _binary(path, text) for path, text in recording["binary"].items()}
    if evidence.environ is not None:
        mine = of_policy(evidence.environ)
        packed["environ"] = {name: scrub_variable(value, identity) for name, value in mine.items()}
    return packed


def _binary(path: str, text: str) -> str:
    """Only of the files that are binary by nature is the content kept; of others, that it is no text."""
    return text if path == PACKED_CONFIG or path.endswith("/gpu_metrics") else _NO_TEXT


def write(file: Path, evidence: Evidence, recording: Mapping[str, Any]) -> int:
    """Write the file.

    Returns:
        The number of things that were read and are in it.

    Raises:
        UsageError: it cannot be written.
    """
    packed = pack(evidence, recording, Identity.of_this_machine(os.environ))
    text = json.dumps(packed, indent=1, sort_keys=True)
    try:
        write_text_atomic(file, text + "\n")
    except OSError as error:
        raise UsageError(f"--capture {file} cannot be written: {error.strerror}; choose another file") from error
    return sum(len(packed[section]) for section in ("files", "binary", "links", "names", "nodes"))


def read(file: Path) -> tuple[Evidence, str]:
    """Read a file that ``write`` has written, or one that was built by hand.

    Returns:
        The evidence in it, and where it comes from.

    Raises:
        UsageError: it is no such file; says what is wrong.
    """
    packed = _load(file)
    tree = RecordedTree(packed)
    environ = packed.get("environ")
    known = isinstance(environ, dict) and all(isinstance(value, str) for value in environ.values())
    if environ is not None and not known:
        raise UsageError(f"--from {file}: 'environ' must map names to texts; is it a file of `doctor --capture`?")
    try:
        software = Software.from_dict(packed["software"]) if packed.get("software") else None
    except ValueError as error:
        raise UsageError(f"--from {file}: {error}; is it a file of `doctor --capture`?") from error
    evidence = Evidence(machine=survey(tree), software=software, environ=environ, recorded=True)
    return evidence, str(packed.get("source") or "a recording that does not say where it comes from")


def _load(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as handle:
            raw = handle.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--from {file} cannot be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"--from {file} is larger than {MAX_BYTES >> 20} MiB: is it a file of `doctor --capture`?")
    try:
        packed = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--from {file} is no JSON text ({error}): is it a file of `doctor --capture`?") from error
    if not isinstance(packed, dict):
        raise UsageError(f"--from {file} holds no JSON object: is it a file of `doctor --capture`?")
    return packed
