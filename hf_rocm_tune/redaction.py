"""What is a secret, and text and settings without secrets: one answer for everything that is printed or written.

Covered: settings and variables that are named like a secret, at any depth; the values that `remember` was given,
wherever they turn up; the forms of well-known access tokens; a password in an address. Not covered: a secret of an
unknown form under a harmless name, and what libraries print themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

REDACTED = "REDACTED"
_SHORTEST_VALUE = 8
"""A shorter value is not looked for in text, where it would turn up by chance."""

_NAME = re.compile(
    r"(?i)passw|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|credential|authorization|"
    r"(?:^|[_-]|auth|access|api)token(?:$|[_-](?!ids?$|indices$|type))"
)
# Names of tokens that a tokenizer knows: text, not secrets.
_MARKER = re.compile(
    r"(?i)^(?:eos|bos|pad|unk|sep|cls|mask|eot|eom|boi|eoi|image|audio|video|start|stop|prefix|suffix|special)[_-]token"
)
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}\b|\bgh[opsu]_[A-Za-z0-9]{16,}\b|\bgithub_pat_\w{16,}\b|\bsk-[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bglpat-[\w-]{16,}|\bxox[abp]-[\w-]{16,}|\bwandb[_-][A-Za-z0-9]{16,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_PAIR = re.compile(
    r"(?P<name>[A-Za-z][\w-]*)(?P<between>\\?[\"']?\s*[=:]\s*\\?(?P<quote>[\"']?))"
    r"(?P<value>(?(quote)[^\s\"',;&)}\]\\]+|[^\"'\\]+))"
)
_FLAG = re.compile(r"(?P<name>--[\w-]+)(?P<between>[\s=]+)(?P<value>(?!-)[^\s\"']+)")
_remembered: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether a setting, a key of a mapping or a variable of this name holds a secret."""
    return _NAME.search(name) is not None and _MARKER.match(name) is None


def without_secrets(value: Any) -> Any:
    """A nested value whose mappings have lost their secret keys; lists and tuples become lists."""
    if isinstance(value, Mapping):
        return {key: without_secrets(each) for key, each in value.items() if not is_secret_name(str(key))}
    if isinstance(value, list | tuple):
        return [without_secrets(each) for each in value]
    return value


def remember(value: Any) -> None:
    """Note the secrets in a nested value, so that `redact` finds them in any text from now on."""
    _remembered.update(secrets_in(value))


def remember_arguments(argv: Sequence[str]) -> None:
    """Note the secrets on a command line: values of secret flags, and nested ones in values that are JSON."""
    for name, value in _flags(argv):
        remember({name: value})
        if value.lstrip()[:1] in ("{", "["):
            try:
                remember(json.loads(value))
            except (ValueError, RecursionError):
                remember({found["name"]: found["value"] for found in _PAIR.finditer(value)})


def secrets_in(value: Any, *, named: bool = False) -> Iterator[str]:
    """The secrets in a nested value that are long enough to be told from other text.

    Args:
        value: mappings, lists and plain values.
        named: the name that it stands under is a secret's.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from secrets_in(each, named=named or is_secret_name(str(key)))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from secrets_in(each, named=named)
    elif named and isinstance(value, str) and len(value) >= _SHORTEST_VALUE and not value.isdigit():
        yield value


def redact(text: str, *, also: Iterable[str] = ()) -> str:
    """A text without secrets.

    Args:
        text: any.
        also: further values to take out.
    """
    for secret in sorted({*_remembered, *also}, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _FLAG.sub(_hidden, _PAIR.sub(_hidden, _FORMS.sub(REDACTED, text)))


def redact_json(value: Any) -> Any:
    """Every string of a JSON value, keys included; the rest stays."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact(str(key)): redact_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact_json(each) for each in value]
    return value


def one_line(text: str) -> str:
    """A text for the terminal: without secrets, and without what would begin another line or control the terminal."""
    return "".join(each if each.isprintable() else " " for each in redact(text))


def _hidden(found: re.Match[str]) -> str:
    value = found["value"]
    # In running text such a name may stand before a colon: what is hidden looks like a secret, is quoted or assigned.
    like_one = len(value) >= _SHORTEST_VALUE and any(each.isdigit() for each in value)
    given = bool(found.groupdict().get("quote")) or "=" in found["between"] or found["name"].startswith("--")
    if not is_secret_name(found["name"].lstrip("-")) or value == REDACTED or not (like_one or given):
        return found[0]
    return f"{found['name']}{found['between']}{REDACTED}"


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name without dashes, value) of each flag on a command line, whatever follows it."""
    name = ""
    for word in argv:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            name = flag.lstrip("-")
            if value:
                yield name, value
        elif name:
            yield name, word
