"""Redaction: secrets everywhere; local paths and names in published texts.

Covered: settings and variables with a secret's name, values of `remember`, forms of well-known tokens, passwords in
addresses; private paths (absolute, or from ``~``); on request names of users and hosts as whole words. Not covered: a
secret of an unknown form under another name, output of libraries, relative paths, pictures.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TextIO

REDACTED = "REDACTED"
_SHORTEST_VALUE = 8

_WORDS = r"passw|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|credential|authorization"
_NAME = re.compile(
    rf"(?i){_WORDS}|"
    r"(?:^|[_-]|auth|access|api)token(?:$|[_-](?!ids?$|indices$|type))"
)
# Names of a tokenizer's tokens, not secrets.
_MARKER = re.compile(
    r"(?i)^(?:eos|bos|pad|unk|sep|cls|mask|eot|eom|boi|eoi|image|audio|video|start|stop|prefix|suffix|special)[_-]token"
)
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}\b|\bgh[opsu]_[A-Za-z0-9]{16,}\b|\bgithub_pat_\w{16,}\b|\bsk-[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bglpat-[\w-]{16,}|\bxox[abp]-[\w-]{16,}|\bwandb[_-][A-Za-z0-9]{16,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_PAIR = re.compile(
    # Other names are not matched: what follows them may have a pair in it.
    rf"(?<![\w-])(?=[\w-]*(?i:{_WORDS}|token))(?P<name>[\w-]+)"
    r"(?P<between>\\?[\"']?\s*[=:]\s*\\?(?P<quote>[\"'])?(?P<scheme>(?i:bearer|basic)\s+)?)"
    r"(?P<value>(?(quote)(?:(?!\\?(?P=quote)).)+|[^\s\"',;&)}\]\\]+))"
)
_FLAG = re.compile(r"(?<![\w-])(?P<name>--[\w-]+)(?P<between>[\s=]+)(?P<value>(?!-)[^\s\"']+)")
_remembered: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether a setting, key or variable of this name has a secret."""
    return _NAME.search(name) is not None and _MARKER.match(name) is None


def without_secrets(value: Any) -> Any:
    """A nested value without the secret keys of its mappings; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: without_secrets(inner) for key, inner in value.items() if not is_secret_name(str(key))}
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return value


def remember(value: Any, *, named: bool = False) -> None:
    """Note for `redact` the secrets in a nested value that are long enough."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            remember(inner, named=named or is_secret_name(str(key)))
    elif isinstance(value, list | tuple):
        for inner in value:
            remember(inner, named=named)
    elif named and isinstance(value, str) and _is_long(value):
        _remembered.add(value)


def _is_long(value: str) -> bool:
    """Whether a value may be searched in text: shorter ones, and numbers, occur by chance."""
    return len(value) >= _SHORTEST_VALUE and not value.isdigit()


def remember_arguments(argv: Sequence[str]) -> None:
    """Note the secrets on a command line: values of secret flags, and nested ones in values that are JSON."""
    name = ""
    for word in argv:
        value = word
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
        remember({name: value})
        for pair in _PAIR.finditer(value):
            remember({pair["name"]: pair["value"]})
        with suppress(ValueError, RecursionError):
            remember(json.loads(value))


def redact(text: str, *, also: Iterable[str] = ()) -> str:
    """A text without secrets."""
    for secret in sorted({*_remembered, *also}, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    text = _FORMS.sub(REDACTED, text)
    text = _PAIR.sub(_hidden, text)
    return _FLAG.sub(_hidden, text)


def redact_json(value: Any) -> Any:
    """Redact every string of a JSON value, keys included."""
    return map_strings(value, redact, redact)


def one_line(text: str) -> str:
    """One line for the terminal, without secrets and control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in redact(text))


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print `one_line` of a text to ``file`` (stdout); a terminal gets line breaks between words, a pipe none."""
    file = file or sys.stdout
    line = one_line(text)
    if file.isatty():
        width = max(shutil.get_terminal_size().columns - 1, 40)
        indent = "#   " if line.startswith("#") else "  "  # a comment in a printed configuration remains one
        line = textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    print(line, file=file, flush=True)


def _hidden(pair: re.Match[str]) -> str:
    """What a name and its value become: the value is hidden where the name is a secret's."""
    name, between, value = pair["name"], pair["between"], pair["value"]
    if value == REDACTED or not is_secret_name(name.lstrip("-")):
        return pair[0]
    # In prose such a name may precede a colon: hide only a value that looks like a secret, is quoted or assigned.
    looks_secret = len(value) >= _SHORTEST_VALUE and any(letter.isdigit() for letter in value)
    groups = pair.groupdict()  # those of a flag have neither quote nor scheme
    is_marked = bool(groups.get("quote") or groups.get("scheme"))
    is_assigned = "=" in between or name.startswith("--")
    if looks_secret or is_marked or is_assigned:
        return f"{name}{between}{REDACTED}"
    return pair[0]


def map_strings(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    """A JSON value with every string changed; tuples become lists."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change_key(str(key)): map_strings(inner, change, change_key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(inner, change, change_key) for inner in value]
    return value


# ---- what is private in a publication ---------------------------------------------------------------------------

_SHORTEST_NAME = 3

# Directories of the system, the same on every machine.
_PUBLIC_ROOTS = frozenset({"usr", "sys", "proc", "dev", "etc", "lib", "lib32", "lib64", "bin", "sbin", "boot"})
# Usual directories of users, on any machine.
_USUAL_ROOTS = frozenset({"home", "Users", "root", "mnt", "media", "tmp", "var", "data", "scratch", "workspace"})
_PUBLIC_NAMES = frozenset(
    {"root", "user", "users", "host", "localhost", "home", "default", "none", "true", "false", "admin", "runner"}
    | {"amd", "gpu", "ubuntu", "fedora", "debian", "arch", "linux", "docker", "test", "data", "model", "train"}
)
# A path in text: absolute with at least two parts, or beginning with ``~``.
_PART = r"[^\s/'\"`<>|:;,(){}\[\]*?\\]+"
_PATH = re.compile(rf"(?:(?<![\w.~/<\\-])|(?<=file://))(?:/({_PART})(?:/{_PART})+/?|~[\w.-]*(?:/{_PART})+/?)")
_HUB_CACHE = re.compile(r"(?:^|/)(?:models|datasets)--(?P<id>[^/]+)(?:/|$)")


@dataclass(frozen=True, kw_only=True)
class Private:
    """Private names of this machine."""

    paths: Mapping[str, str] = field(default_factory=dict)  # and what stands for each, the longest path first
    users: tuple[str, ...] = ()  # login names
    hosts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)  # values
    roots: frozenset[str] = _USUAL_ROOTS  # directories in ``/`` in which every path is private

    @classmethod
    def of_this_machine(
        cls, environ: Mapping[str, str], *, paths: Mapping[str, str] | None = None, secrets: Iterable[str | None] = ()
    ) -> Private:
        """Those of this machine and its variables; ``paths`` with their replacement ("" for the last part)."""
        homes = {environ.get("HOME", ""), os.path.expanduser("~")} - {"", "/", "~"}
        known = dict.fromkeys(homes, "~")
        for path, instead in (paths or {}).items():
            for spelling in {path, os.path.abspath(path), os.path.realpath(path)}:
                if len(Path(spelling).parts) > 1:
                    known[spelling.rstrip("/")] = instead or _last_name(spelling)
        users = [environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")]
        hosts = [platform.node(), environ.get("HOSTNAME", "")]
        held = [value for name, value in environ.items() if is_secret_name(name) and not value.startswith("/")]
        return cls(
            paths={path: known[path] for path in sorted(known, key=len, reverse=True)},
            users=_names([*users, *(Path(home).name for home in homes)]),
            hosts=_names([*hosts, *(host.partition(".")[0] for host in hosts)]),
            secrets=tuple({value for value in (*held, *secrets) if value and _is_long(value)}),
            roots=_USUAL_ROOTS | ({entry.name for entry in os.scandir("/") if entry.is_dir()} - _PUBLIC_ROOTS),
        )

    @cached_property
    def path_patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """What finds each path in a text, and the template of its replacement."""
        return [
            (re.compile(rf"(?<![\w/]){re.escape(path)}(?![\w-])"), instead.replace("\\", r"\\"))
            for path, instead in self.paths.items()
        ]

    @cached_property
    def name_patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """Likewise for each name of a user or a host."""
        known = [*((name, "user") for name in self.users), *((name, "host") for name in self.hosts)]
        return [(re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])"), instead) for name, instead in known]

    def is_local(self, name: str) -> bool:
        """Whether a model or dataset is named by a local path, not by an id of the Hub."""
        return name.startswith(("/", "~", ".", "file:")) or name in self.paths or os.path.exists(name)


def local_paths(settings: Any) -> list[str]:
    """The strings of a nested value that are absolute paths, or name an existing local file or directory."""
    if isinstance(settings, str):
        is_path = os.path.isabs(settings) or (os.sep in settings and os.path.exists(settings))
        return [settings] if is_path else []
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        return [path for inner in settings for path in local_paths(inner)]
    return []


def hub_id_of(path: str) -> str | None:
    """The id of a path in the Hub's cache (``.../models--ORG--NAME/snapshots/...``); None for others."""
    cached = _HUB_CACHE.search(path)
    if cached is None:
        return None
    return cached["id"].replace("--", "/", 1)


def scrub_text(text: str, private: Private, *, names: bool = True) -> str:
    """A text without secrets and local paths; ``names``: without names of users and hosts, too."""
    text = redact(text, also=private.secrets)
    for pattern, instead in private.path_patterns:
        text = pattern.sub(instead, text)
    text = _PATH.sub(partial(_shortened, private), text)
    if names:
        for pattern, instead in private.name_patterns:
            text = pattern.sub(instead, text)
    return text


def scrub_json(value: Any, private: Private, *, names: bool = True) -> Any:
    """`scrub_text` on every string of a JSON value; names in keys stay."""
    scrub = partial(scrub_text, private=private)
    return map_strings(value, partial(scrub, names=names), partial(scrub, names=False))


def find_private(content: bytes, private: Private) -> str | None:
    """The literal secrets and paths of `Private` in bytes, in words; None for none. Patterns would occur by chance."""
    for secret in private.secrets:
        if secret.encode() in content:
            return "a secret"
    for path, instead in private.paths.items():
        is_home_or_short = instead == "~" or len(Path(path).parts) <= 2
        if not is_home_or_short and path.encode() in content:
            return f"the path {path}"
    return None


def _shortened(private: Private, match: re.Match[str]) -> str:
    """``.../NAME`` for a private path; others stay."""
    path, root = match[0], match[1]  # no root: the path begins with ``~``
    if root is not None and root not in private.roots and not path.startswith("/dev/shm/"):
        return path
    last = _last_name(path)
    if last in private.users or last.startswith("~"):
        return "..."
    return f".../{last}"


def _last_name(path: str) -> str:
    """The last part of a path, or its id in the Hub's cache."""
    return hub_id_of(path) or Path(path.rstrip("/")).name


def _names(candidates: Iterable[str]) -> tuple[str, ...]:
    """The names to hide, the longest first, since one may contain another."""
    kept = set()
    for name in candidates:
        if len(name) >= _SHORTEST_NAME and name.lower() not in _PUBLIC_NAMES and not name.isdigit():
            kept.add(name)
    return tuple(sorted(kept, key=lambda name: (-len(name), name)))
