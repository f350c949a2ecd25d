"""A machine as a file, written here without names and secrets and diagnosed elsewhere; and reports without them.

The file is the recording of the machine (``machine.sysfs`` says its form) with the doctor's own sections::

    {"schema": 1, "source": "hf-rocm-tune 0.1.0", ..., "software": {...}, "environ": {"HIP_VISIBLE_DEVICES": "0"}}

``software`` is ``Software.to_dict()``; ``environ`` holds variables of the policy only. Where one is missing, what hangs
on it is unknown. Only what was read is in a recording at all; what is left is text that may still hold a home directory
or a name, and is looked through string by string, keys included, as are the reports of ``--json`` and ``--markdown``.

Secrets are the matter of ``hf_rocm_tune.redaction``. Not covered: directories that are no home directories, but for
names in them; and, outside of a home directory, a name that is also a word of what the doctor itself says ("torch",
"card"): alone it tells nobody anything, and without it the text would be spoilt.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import getpass
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from hf_rocm_tune.doctor.findings import GROUPS, Evidence, all_rows
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.machine.cards import CARDS
from hf_rocm_tune.machine.host import PACKED_CONFIG
from hf_rocm_tune.machine.software import PACKAGES, Software, TorchDevice
from hf_rocm_tune.machine.survey import survey
from hf_rocm_tune.machine.sysfs import RecordedTree, Recording
from hf_rocm_tune.machine.variables import POLICY
from hf_rocm_tune.machine.visible import FILTERS
from hf_rocm_tune.redaction import redact
from hf_rocm_tune.version import __version__

MAX_BYTES = 32 << 20
_NO_TEXT = base64.b64encode(b"\0\0\0\0").decode()
_WHAT = "is it a file of `doctor --capture`?"
# Names that say nothing about anybody, and that stand in files of every machine.
_PUBLIC = frozenset(
    {"root", "user", "users", "host", "localhost", "home", "default", "system", "slice", "none", "true", "false"}
    | {"amd", "amdgpu", "gpu", "kfd", "render", "video", "card", "pci", "usb", "proc", "sys", "dev", "lib", "boot"}
    | {"docker", "podman", "lxc", "container", "linux", "ubuntu", "fedora", "debian", "arch", "runner", "test"}
)
_SHORTEST_NAME = 3
_CONTROL_GROUPS, _GROUP_MOUNTS = "proc/self/cgroup", "sys/fs/cgroup/"
# How engines name the control groups of their containers (machine.host).
_ENGINES = ("docker", "libpod", "kubepods", "crio-", "containerd", "lxc")
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<![\w.-])(/home|/Users|/var/home|[A-Za-z]:[\\/]Users)([\\/])[^\\/\s:;,'\"`()<>]+"), r"\1\2user"),
    (re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b"), "00:00:00:00:00:00"),
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "00000000-0000-0000-0000-000000000000"),
    (re.compile(r"\bGPU-[0-9a-fA-F]{8,32}\b"), "GPU-0000000000000000"),
    # Ids of containers and digests; nothing that a check reads is as long.
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), "0" * 32),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "user@host"),
    (re.compile(r"(?m)^((?:unique_id|serial_number|serial)\b\s*:?\s*)\S+"), r"\g<1>0"),
)
_IP_ADDRESS = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w.])")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The names that must not get out of this machine.

    Attributes:
        users: login names.
        hosts: names of this machine, the short one too.
        homes: home directories that do not lie where home directories lie as a rule.
    """

    users: tuple[str, ...]
    hosts: tuple[str, ...]
    homes: tuple[str, ...]

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str]) -> Identity:
        """Whatever the system and the variables call the user and the machine."""
        users = [environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")]
        hosts = [platform.node(), environ.get("HOSTNAME", "")]
        hosts += [host.partition(".")[0] for host in hosts]
        homes = [environ.get("HOME", "")]
        with contextlib.suppress(OSError, KeyError, ImportError):  # no entry for this user id, as in containers
            homes.append(os.path.expanduser("~"))
            users.append(getpass.getuser())
        users += [Path(home).name for home in homes]
        return cls(users=_names(users), hosts=_names(hosts), homes=tuple(sorted({h for h in homes if len(h) > 1})))

    def out_of(self, text: str) -> str:
        """One text without names, secrets and serial numbers."""
        for home in self.homes:
            if home not in ("/", "/root", "/tmp"):
                text = re.sub(rf"{re.escape(home)}(?=/|\b|$)", "/home/user", text)
        text = redact(text)
        for form, instead in _FORMS:
            text = form.sub(instead, text)
        for names, instead in ((self.users, "user"), (self.hosts, "host")):
            for name in names:
                text = re.sub(rf"(?i)(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", instead, text)
        return text

    def out_of_variable(self, value: str) -> str:
        """The value of a variable; network addresses go too, which elsewhere would be versions."""
        return _IP_ADDRESS.sub("0.0.0.0", self.out_of(value))

    def out_of_json(self, value: Any) -> Any:
        """Every string of a JSON value, keys included; numbers and the rest stay."""
        if isinstance(value, str):
            return self.out_of(value)
        if isinstance(value, Mapping):
            return {self.out_of(key): self.out_of_json(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.out_of_json(entry) for entry in value]
        return value


def _names(found: Iterable[str]) -> tuple[str, ...]:
    """Those that are worth hiding, the longest first so that a name within a name does not spoil it."""
    public = _PUBLIC | _own_words()
    kept = {name for name in found if len(name) >= _SHORTEST_NAME and name.lower() not in public and not name.isdigit()}
    return tuple(sorted(kept, key=lambda name: (-len(name), name)))


@cache
def _own_words() -> frozenset[str]:
    """The words of what is said here whoever owns the machine, and of the form of a recording."""
    texts = [text for row in all_rows().values() for text in (row.title, row.says, row.cure, *row.sources)]
    texts += [text for row in POLICY for text in (*row.variables, row.reason, row.cure, row.source, row.value or "")]
    texts += [f"{card.name} {card.arch} {card.matrix}" for card in CARDS]
    texts += [*GROUPS, *GROUPS.values(), *PACKAGES, "schema source binary value reason usable group"]
    texts += [field.name for form in (Software, TorchDevice, Recording) for field in fields(form)]
    return frozenset(word.lower() for text in texts for word in re.split("[^A-Za-z0-9]+", text))


def _without_groups(recording: Mapping[str, Any]) -> dict[str, Any]:
    """A recording whose control groups have numbers for names: users and services name theirs as they like.

    What tells a container engine stays, and every path keeps its depth, so that limits are found as before.
    """
    group_file = recording.get("files", {}).get(_CONTROL_GROUPS, "")
    # Lines of ``hierarchy:controllers:path``, and a path may hold colons.
    parts = [part for line in group_file.splitlines() for part in line.split(":", 2)[-1].split("/")]
    named = [part for part in dict.fromkeys(parts) if part not in ("", ".", "..", "memory", "unified")]
    engines = {part: next((word for word in _ENGINES if word in part), "") for part in named}
    numbers = {part: engines[part] or f"group{number}" for number, part in enumerate(named)}

    def renamed(path: str) -> str:
        return "/".join(numbers.get(part, part) for part in path.split("/"))

    changed = dict(recording)
    for section in ("files", "binary", "links", "names", "errors", "nodes"):
        entries = recording.get(section, {})
        changed[section] = {renamed(k) if k.startswith(_GROUP_MOUNTS) else k: v for k, v in entries.items()}
    if group_file:
        changed["files"][_CONTROL_GROUPS] = "\n".join(map(renamed, group_file.splitlines()))
    return changed


def of_policy(environ: Mapping[str, str]) -> dict[str, str]:
    """Those variables that the policy says something about, and the filters of visible devices."""
    patterns = {*FILTERS, *(pattern for row in POLICY for pattern in row.variables)}
    return {
        name: value
        for name, value in sorted(environ.items())
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def pack(evidence: Evidence, recording: Mapping[str, Any], identity: Identity) -> dict[str, Any]:
    """What goes into the file, of this machine's evidence and the recording of what was read for it."""
    software = evidence.software.to_dict() if evidence.software else {}
    packed: dict[str, Any] = identity.out_of_json({**_without_groups(recording), "software": software, "binary": {}})
    packed["source"] = f"hf-rocm-tune {__version__}, doctor --capture"
    # Only of the files that are binary by nature is the content kept; of others, that it is no text.
    packed["binary"] = {
        identity.out_of(path): text if path == PACKED_CONFIG or path.endswith("/gpu_metrics") else _NO_TEXT
        for path, text in recording["binary"].items()
    }
    if evidence.environ is not None:
        mine = of_policy(evidence.environ)
        packed["environ"] = {name: identity.out_of_variable(value) for name, value in mine.items()}
    return packed


def write(file: Path, evidence: Evidence, recording: Mapping[str, Any]) -> int:
    """Write the file; the number of things that were read and are in it.

    Raises:
        UsageError: it cannot be written.
    """
    packed = pack(evidence, recording, Identity.of_this_machine(os.environ))
    try:
        write_text_atomic(file, json.dumps(packed, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise UsageError(f"--capture {file} cannot be written: {error.strerror}; choose another file") from error
    return sum(len(packed[section]) for section in ("files", "binary", "links", "names", "nodes"))


def read(file: Path) -> tuple[Evidence, str]:
    """The evidence in a file that `write` has written or that was built by hand, and where it comes from.

    Raises:
        UsageError: it is no such file; says what is wrong.
    """
    packed = _load(file)
    tree = RecordedTree(packed)
    environ = packed.get("environ")
    known = isinstance(environ, dict) and all(isinstance(value, str) for value in environ.values())
    if environ is not None and not known:
        raise UsageError(f"--from {file}: 'environ' must map names to texts; {_WHAT}")
    try:
        software = Software.from_dict(packed["software"]) if packed.get("software") else None
    except ValueError as error:
        raise UsageError(f"--from {file}: {error}; {_WHAT}") from error
    evidence = Evidence(machine=survey(tree), software=software, environ=environ, recorded=True)
    return evidence, str(packed.get("source") or "a recording that does not say where it comes from")


def _load(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as handle:
            raw = handle.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--from {file} cannot be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"--from {file} is larger than {MAX_BYTES >> 20} MiB: {_WHAT}")
    try:
        packed = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--from {file} is no JSON text ({error}): {_WHAT}") from error
    if not isinstance(packed, dict):
        raise UsageError(f"--from {file} holds no JSON object: {_WHAT}")
    return packed
