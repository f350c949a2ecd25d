"""What a row of the environment policy is, and the tests that rows put to a variable's value.

``environ.policy`` holds the rows, ``environ.decide`` evaluates them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Action = Literal["set", "keep", "info", "warn", "error"]
Versions = tuple[str | None, str | None]  # from (inclusive), to (exclusive); None is open


def allocator_options(value: str) -> dict[str, str]:
    """``expandable_segments:True,max_split_size_mb:512`` as lower-case names and values."""
    pairs = (part.partition(":") for part in value.split(","))
    return {name.strip().lower(): setting.strip().lower() for name, _, setting in pairs if name.strip()}


def present(value: str) -> bool:
    return True


def one(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "on", "yes")


def zero(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "off", "no")


def non_zero(value: str) -> bool:
    return bool(value.strip()) and not zero(value)


def is_11_0_0(value: str) -> bool:
    return value.strip() == "11.0.0"


def is_11_5_1(value: str) -> bool:
    return value.strip() == "11.5.1"


def another_override(value: str) -> bool:
    return bool(value.strip()) and not is_11_0_0(value) and not is_11_5_1(value)


def under_tmp(value: str) -> bool:
    return value.strip() == "/tmp" or value.strip().startswith("/tmp/")


def expandable(value: str) -> bool:
    return allocator_options(value).get("expandable_segments") == "true"


def expandable_with_split(value: str) -> bool:
    return expandable(value) and "max_split_size_mb" in allocator_options(value)


def expandable_alone(value: str) -> bool:
    return expandable(value) and not expandable_with_split(value)


def async_backend(value: str) -> bool:
    return allocator_options(value).get("backend") in ("cudamallocasync", "hipmallocasync")


_WHOLE = re.compile(r"[0-9]{1,18}")
_NUMBER = re.compile(r"[0-9]{0,9}(\.[0-9]{1,18})?")


def _is_refused(name: str, setting: str) -> bool:
    whole = int(setting) if _WHOLE.fullmatch(setting) else None
    if name == "expandable_segments":
        return setting not in ("True", "False")
    if name == "max_split_size_mb":
        return not setting[:1].isdigit() if whole is None else whole < 20
    if name == "garbage_collection_threshold":
        return not setting or not _NUMBER.fullmatch(setting) or not 0 < float(setting) < 1
    return name == "roundup_power2_divisions" and whole is not None and whole.bit_count() != 1


def refused(value: str) -> bool:
    """Whether torch raises over an allocator setting: tried with torch 2.13, and only what is plain there."""
    pairs = (part.partition(":") for part in value.split(","))
    return any(_is_refused(name.strip(), setting.strip()) for name, colon, setting in pairs if colon)


def high_threshold(value: str) -> bool:
    setting = allocator_options(value).get("garbage_collection_threshold", "")
    return not refused(value) and bool(_NUMBER.fullmatch(setting)) and setting != "" and float(setting) > 0.9


def values_differ(present: Mapping[str, str]) -> bool:
    return len({value.strip() for value in present.values()}) > 1


def nested(present: Mapping[str, str]) -> bool:
    return len(present) > 1 and "ROCR_VISIBLE_DEVICES" in present


def twice(present: Mapping[str, str]) -> bool:
    return len(present) > 1 and "ROCR_VISIBLE_DEVICES" not in present


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the policy.

    Attributes:
        variables: names; a ``*`` stands for any rest of a name.
        action: ``set`` where the user has not; ``keep`` without a word; or say it as ``info``, ``warn``, ``error``.
        reason: one line: what is the case; ``{instead}`` is replaced by ``instead``.
        cure: one line: what to do; ``{instead}`` likewise. Only rows that set or keep have none.
        source: issue, document or source file that says so.
        topic: rows of one topic exclude each other for one variable; empty for a topic of its own.
        value: what to set, for action ``set``.
        test: which values the row is about (rows that do not set).
        together: the row is about several of its variables at once; takes those that are present.
        torch: range of torch versions.
        torch_releases: or single torch releases.
        rocm: range of ROCm major versions.
        has_arch: an architecture that must be among the visible ones.
        only_arch: an architecture that must be the only visible one.
        not_only_arch: an architecture that must not be the only visible one.
        flash_attn: range of versions of an installed flash-attn.
        finding: something that a check has found on this machine, for example ``peer_copy_failed``.
        any_build: also where torch is known not to be a ROCm build.
        instead: the name that is really read; a ``*`` is replaced by what ``*`` stood for.
    """

    variables: tuple[str, ...]
    action: Action
    reason: str
    source: str
    cure: str = ""
    topic: str = ""
    value: str | None = None
    test: Callable[[str], bool] = present
    together: Callable[[Mapping[str, str]], bool] | None = None
    torch: Versions | None = None
    torch_releases: tuple[str, ...] = ()
    rocm: Versions | None = None
    has_arch: str | None = None
    only_arch: str | None = None
    not_only_arch: str | None = None
    flash_attn: Versions | None = None
    finding: str | None = None
    any_build: bool = False
    instead: str | None = None

    def __post_init__(self) -> None:
        assert all((self.reason, self.source, self.variables)), "every row says why and on whose word"
        assert (self.action == "set") == (self.value is not None), "exactly the rows that set have a value"
        assert (self.action in ("set", "keep")) == (not self.cure), "exactly the rows that find fault have a cure"
