"""Takes out of what leaves this machine what is nobody's business: names, secrets, serial numbers, network addresses.

That is a recording (``--capture``), and the report of ``--json`` and ``--markdown``; the table on the terminal shows
what was read. First only what was read is in a recording at all (``hardware.keep_sysfs``), and only variables of the
policy. What is left is text that may still hold a home directory or a name, and is looked through string by string,
keys included.

Not covered: a secret of an unknown form in a variable of the policy; directories that are no home directories, but for
names in them; and, outside of a home directory, a name that is also a word of what the doctor itself says ("torch",
"card"): alone it tells nobody anything, and without it the text would be spoilt. The command says where the file is,
to be read.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from hf_rocm_tune.doctor.check import GROUPS
from hf_rocm_tune.doctor.finding import Finding
from hf_rocm_tune.doctor.rows import all_rows
from hf_rocm_tune.machine.cards import CARDS
from hf_rocm_tune.machine.software import PACKAGES, Software, TorchDevice
from hf_rocm_tune.machine.sysfs import Recording
from hf_rocm_tune.machine.variables import POLICY
from hf_rocm_tune.redaction import redact

# Names that say nothing about anybody, and that stand in files of every machine.
_PUBLIC = frozenset(
    {"root", "user", "users", "host", "localhost", "home", "default", "system", "slice", "none", "true", "false"}
    | {"amd", "amdgpu", "gpu", "kfd", "render", "video", "card", "pci", "usb", "proc", "sys", "dev", "lib", "boot"}
    | {"docker", "podman", "lxc", "container", "linux", "ubuntu", "fedora", "debian", "arch", "runner", "test"}
)
_SHORTEST_NAME = 3
_GROUPS = "proc/self/cgroup"
_GROUP_MOUNTS = "sys/fs/cgroup/"
# How engines name the control groups of their containers (hardware.container_sysfs).
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
        homes = [environ.get("HOME", ""), _home()]
        with contextlib.suppress(OSError, KeyError, ImportError):  # no entry for this user id, as in containers
            users.append(getpass.getuser())
        users += [Path(home).name for home in homes]
        return cls(users=_names(users), hosts=_names(hosts), homes=tuple(sorted({h for h in homes if len(h) > 1})))


def _home() -> str:
    try:
        return os.path.expanduser("~")
    except (OSError, KeyError):
        return ""


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


def without_groups(recording: Mapping[str, Any]) -> dict[str, Any]:
    """A recording whose control groups have numbers for names: users and services name theirs as they like.

    What tells a container engine stays, and every path keeps its depth, so that limits are found as before.
    """
    group_file = recording.get("files", {}).get(_GROUPS, "")
    # Lines of ``hierarchy:controllers:path``, and a path may hold colons.
    parts = [part for line in group_file.splitlines() for part in line.split(":", 2)[-1].split("/")]
    named = [part for part in dict.fromkeys(parts) if part not in ("", ".", "..", "memory", "unified")]
    numbers = {part: _engine(part) or f"group{number}" for number, part in enumerate(named)}

    def renamed(path: str) -> str:
        return "/".join(numbers.get(part, part) for part in path.split("/"))

    changed = dict(recording)
    for section in ("files", "binary", "links", "names", "errors", "nodes"):
        entries = recording.get(section, {})
        changed[section] = {renamed(k) if k.startswith(_GROUP_MOUNTS) else k: v for k, v in entries.items()}
    if group_file:
        changed["files"][_GROUPS] = "\n".join(map(renamed, group_file.splitlines()))
    return changed


def _engine(part: str) -> str:
    return next((word for word in _ENGINES if word in part), "")


def scrub_text(text: str, identity: Identity) -> str:
    """One text without names, secrets and serial numbers."""
    for home in identity.homes:
        if home not in ("/", "/root", "/tmp"):
            text = re.sub(rf"{re.escape(home)}(?=/|\b|$)", "/home/user", text)
    text = redact(text)
    for form, instead in _FORMS:
        text = form.sub(instead, text)
    for names, instead in ((identity.users, "user"), (identity.hosts, "host")):
        for name in names:
            text = re.sub(rf"(?i)(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", instead, text)
    return text


def scrub(value: Any, identity: Identity) -> Any:
    """Every string of a JSON value, keys included; numbers and the rest stay."""
    if isinstance(value, str):
        return scrub_text(value, identity)
    if isinstance(value, Mapping):
        return {scrub(key, identity): scrub(entry, identity) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(entry, identity) for entry in value]
    return value


def scrub_variable(value: str, identity: Identity) -> str:
    """The value of a variable; network addresses go too, which elsewhere would be versions."""
    return _IP_ADDRESS.sub("0.0.0.0", scrub_text(value, identity))


def scrub_finding(finding: Finding, identity: Identity) -> Finding:
    """A finding without names, secrets and serial numbers in what it says and shows."""
    clean = scrub_variable if finding.check == "variables" else scrub_text
    return replace(
        finding,
        title=clean(finding.title, identity),
        text=clean(finding.text, identity),
        evidence=tuple(clean(line, identity) for line in finding.evidence),
        cure=clean(finding.cure, identity),
        subject=clean(finding.subject, identity),
    )
