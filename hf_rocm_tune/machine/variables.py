"""Environment variables: set, keep or warn, each with its reason and source, before torch is imported.

``variables.toml`` holds the rows of the policy. A row applies when all its conditions hold. A condition on an
unknown fact (torch's version, the architectures of the GPUs) makes the row *cautious*: it names the unknown fact, an
error becomes a warning, and nothing is set. A row that only says that a variable exists yields to more specific rows.
The user's values are never overridden. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
import tomllib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, Literal, TextIO, TypeVar, cast, get_args, get_type_hints

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.process import FILTERS
from hf_rocm_tune.machine.sysfs import Reading, table_rows

Spec = TypeVar("Spec")
Action = Literal["set", "keep", "info", "warn", "error"]

MARK_SET = "HF_ROCM_TUNE_SET"
"""Variable that child processes inherit: which variables are ours and not the user's."""
_MARK_TOLD = "HF_ROCM_TUNE_TOLD"
_SEVERITY: Mapping[Action, int] = {"error": 3, "warn": 2, "info": 1, "keep": 0, "set": 0}
_ORDER: Sequence[Action] = ("error", "warn", "set", "info", "keep")
_LABEL: Mapping[Action, str] = {"error": "error", "warn": "warning", "info": "note"}
_OTHER_FORM = "torch/version.py has another form than expected"


def _options(value: str) -> dict[str, str]:
    """``expandable_segments:True,max_split_size_mb:512`` as lower-case names and values."""
    pairs = (part.partition(":") for part in value.lower().split(","))
    return {name.strip(): setting.strip() for name, _, setting in pairs if name.strip()}


def _is_one(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "on", "yes")


def _is_zero(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "off", "no")


def _expandable(value: str) -> bool:
    return _options(value).get("expandable_segments") == "true"


def _refuses(name: str, setting: str) -> bool:
    """Whether torch 2.13 rejects one setting of the allocator (tried)."""
    whole = int(setting) if re.fullmatch("[0-9]{1,18}", setting) else None
    if name == "expandable_segments":
        return setting not in ("True", "False")
    if name == "max_split_size_mb":
        return not setting[:1].isdigit() if whole is None else whole < 20
    if name == "garbage_collection_threshold":
        return not _is_number(setting) or not 0 < float(setting) < 1
    return name == "roundup_power2_divisions" and whole is not None and whole.bit_count() != 1


def _is_number(setting: str) -> bool:
    return bool(setting and re.fullmatch(r"[0-9]{0,9}(\.[0-9]{1,18})?", setting))


def _refused(value: str) -> bool:
    pairs = (part.partition(":") for part in value.split(","))
    return any(_refuses(name.strip(), setting.strip()) for name, colon, setting in pairs if colon)


def _high_threshold(value: str) -> bool:
    setting = _options(value).get("garbage_collection_threshold", "")
    return not _refused(value) and _is_number(setting) and float(setting) > 0.9


_TESTS: Mapping[str, Callable[[str], bool]] = {
    "present": lambda value: True,
    "one": _is_one,
    "zero": _is_zero,
    "non_zero": lambda value: bool(value.strip()) and not _is_zero(value),
    "is_11_0_0": lambda value: value.strip() == "11.0.0",
    "is_11_5_1": lambda value: value.strip() == "11.5.1",
    "another_override": lambda value: value.strip() not in ("", "11.0.0", "11.5.1"),
    "under_tmp": lambda value: f"{value.strip()}/".startswith("/tmp/"),
    "expandable": _expandable,
    "expandable_with_split": lambda value: _expandable(value) and "max_split_size_mb" in _options(value),
    "expandable_alone": lambda value: _expandable(value) and "max_split_size_mb" not in _options(value),
    "async_backend": lambda value: _options(value).get("backend") in ("cudamallocasync", "hipmallocasync"),
    "refused": _refused,
    "high_threshold": _high_threshold,
}
_TOGETHER: Mapping[str, Callable[[Mapping[str, str]], bool]] = {
    "values_differ": lambda present: len({value.strip() for value in present.values()}) > 1,
    "nested": lambda present: len(present) > 1 and "ROCR_VISIBLE_DEVICES" in present,
    "twice": lambda present: len(present) > 1 and "ROCR_VISIBLE_DEVICES" not in present,
}


@dataclass(frozen=True, kw_only=True)
class VariableRule:
    """One row of the policy.

    Attributes:
        variables: names; a ``*`` stands for any rest of a name that is not empty.
        action: ``set`` unless the user has; ``keep`` without a message; or report as ``info``, ``warn``, ``error``.
        reason, cure: one line each: the fact, what to do; ``{instead}`` is replaced by `instead`. Rows that set or keep
            have no cure.
        source: issue, document or source file, several with semicolons.
        topic: rows of one topic exclude each other for one variable; empty for a topic of its own.
        value: what to set, for action ``set``.
        test: which values the row is about (rows that do not set), by a name of ``_TESTS``.
        together: the row concerns a combination of its variables, by a name of ``_TOGETHER``.
        torch, rocm, flash_attn: versions from (inclusive) and to (exclusive); empty means no limit.
        torch_releases: or single torch releases.
        has_arch: an architecture that must be among the visible ones.
        only_arch, not_only_arch: an architecture that must, or must not, be the only visible one.
        finding: of a check on this machine, for example ``peer_copy_failed``.
        any_build: also if torch is not a ROCm build.
        instead: the name that is really read; ``*`` is the part after the first ``_`` of the variable's name.
    """

    variables: tuple[str, ...]
    action: Action
    reason: str
    source: str
    cure: str = ""
    topic: str = ""
    value: str | None = None
    test: str = "present"
    together: str = ""
    torch: tuple[str, ...] = ()
    rocm: tuple[str, ...] = ()
    flash_attn: tuple[str, ...] = ()
    torch_releases: tuple[str, ...] = ()
    has_arch: str = ""
    only_arch: str = ""
    not_only_arch: str = ""
    finding: str = ""
    any_build: bool = False
    instead: str = ""

    def __post_init__(self) -> None:
        assert (self.action == "set") == (self.value is not None), "exactly the rows that set have a value"
        assert (self.action in ("set", "keep")) == (not self.cure), "exactly the rows that find fault have a cure"
        assert self.test in _TESTS and self.together in ("", *_TOGETHER), "a test that is there"

    def names(self, variable: str) -> bool:
        return any(fnmatchcase(variable, pattern.replace("*", "?*")) for pattern in self.variables)


POLICY = tuple(VariableRule(**row) for row in table_rows(Path(__file__).with_suffix(".toml"), "row"))


_ADDRESSES = tomllib.loads(Path(__file__).with_name("addresses.toml").read_text(encoding="utf-8"))


def link_of(source: str) -> str:
    """The address of an issue such as ``rccl#1129``, or of a document; empty if unknown."""
    repository, _, number = source.partition("#")
    if number.isdecimal() and repository in _ADDRESSES["repositories"]:
        # GitHub redirects an issue's address to a pull request of that number.
        return f"https://github.com/{_ADDRESSES['repositories'][repository]}/issues/{number}"
    found: str = _ADDRESSES["pages"].get(source, "")
    return found


def links_of(source: str) -> tuple[str, ...]:
    """The known addresses of several sources, separated by semicolons."""
    return tuple(dict.fromkeys(filter(None, (link_of(name.strip()) for name in source.split(";")))))


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts that rows may depend on. Unknown is None with an entry in ``reasons``, keyed by the field's name.

    Attributes:
        hip_version: of torch's build, for example ``7.2.26015``; None without a reason means: not a ROCm build.
        archs: visible GPUs' architectures in order, one entry a GPU.
        flash_attn_version: None without a reason means: not installed.
        findings: of checks on this machine, for example ``peer_copy_failed``.
    """

    torch_version: str | None
    hip_version: str | None
    archs: tuple[str, ...] | None
    flash_attn_version: str | None = None
    findings: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_rocm(self) -> bool | None:
        """Whether torch is a ROCm build; None where that could not be read."""
        if self.hip_version is not None:
            return True
        return None if "hip_version" in self.reasons else False


def package_directory(package: str) -> Path | None:
    """The directory of an installed package, without importing it; None if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a half-made module in sys.modules has no spec
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def read_torch_file() -> Reading[dict[str, str | None]]:
    """The assignments of ``torch/version.py`` to ``__version__``, ``hip``, ``rocm`` and ``cuda``, without importing
    torch; None for a value that is not a text."""
    directory = package_directory("torch")
    if directory is None:
        return Reading(value=None, reason="torch is not installed")
    try:
        text = (directory / "version.py").read_text("utf-8", errors="replace")
    except OSError as error:
        return Reading(value=None, reason=f"torch/version.py: {error.strerror}")
    found: dict[str, str | None] = {}
    for name in ("__version__", "hip", "rocm", "cuda"):
        if re.search(rf"^{name}\b", text, re.MULTILINE):
            quoted = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
            found[name] = quoted[1] if quoted else None
    return Reading(value=found) if found.get("__version__") else Reading(value=None, reason=_OTHER_FORM)


def read_facts(*, archs: tuple[str, ...] | None = None) -> MachineFacts:
    """Read the versions of torch and flash-attn without importing them; `archs`: of the visible GPUs, or None."""
    reasons: dict[str, str] = {} if archs is not None else {"archs": "the visible GPUs were not read"}
    torch, flash_attn = read_torch_file(), None
    stated = torch.value or {}
    if torch.value is None:
        reasons["torch_version"] = torch.reason
    if "hip" not in stated:
        reasons["hip_version"] = torch.reason or _OTHER_FORM
    if package_directory("flash_attn") is not None:
        from importlib import metadata  # takes a moment that every start of the package would pay

        try:
            flash_attn = metadata.version("flash-attn")
        except metadata.PackageNotFoundError:
            reasons["flash_attn_version"] = "flash_attn exists, but no distribution of that name"
    return MachineFacts(
        torch_version=stated.get("__version__"),
        hip_version=stated.get("hip"),
        archs=archs,
        flash_attn_version=flash_attn,
        reasons=reasons,
    )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision on one variable.

    Attributes:
        variable: its name, or several with commas.
        action: all but ``set`` keep the user's value.
        value: the current value; None if unset.
        source: issues and documents, separated by semicolons.
        cure: what to do, one line, or empty.
    """

    variable: str
    action: Action
    value: str | None
    reason: str
    source: str
    cure: str = ""

    @property
    def links(self) -> tuple[str, ...]:
        """Known addresses of the sources."""
        return links_of(self.source)


DECISIONS: list[Decision] = []
"""The decisions of this process, each once."""
# Facts of this machine, by the filters of visible GPUs.
_FACTS: dict[tuple[str | None, ...], MachineFacts] = {}


def covers(name: str) -> bool:
    return any(row.names(name) for row in POLICY)


def version_numbers(version: str) -> tuple[int, ...] | None:
    """``2.13.0+rocm7.2`` as (2, 13, 0, 0), padded so that equal versions compare equal; None where it is no version."""
    match = re.match(r"\s*([0-9]+(?:\.[0-9]+)*)", version)
    return None if match is None else tuple([*map(int, match[1].split(".")[:4]), 0, 0, 0][:4])


def within(version: str, low: str | None, high: str | None) -> bool:
    """Whether ``low <= version < high``; an open end is None or empty, and what is no version is in no range."""
    value, first, end = (version_numbers(one) if one else None for one in (version, low, high))
    return value is not None and (first is None or value >= first) and (end is None or value < end)


def _conditions(row: VariableRule, facts: MachineFacts) -> Iterator[tuple[bool | None, str]]:
    """Each condition of a row: whether it holds (None: not known), and the field of the facts that it depends on."""
    if not row.any_build:
        yield facts.is_rocm, "hip_version"
    stated = {"torch_version": row.torch, "hip_version": row.rocm, "flash_attn_version": row.flash_attn}
    for name, wanted in stated.items():
        version: str | None = getattr(facts, name)
        if wanted and (version is None or version_numbers(version) is None):
            # A missing package is in no range; one of unknown version may be in any.
            yield None if version or name == "torch_version" or name in facts.reasons else False, name
        elif wanted:
            yield within(version or "", *wanted), name
    if row.torch_releases:
        release = version_numbers(facts.torch_version or "")
        yield None if release is None else "{}.{}".format(*release) in row.torch_releases, "torch_version"
    archs = facts.archs
    if row.has_arch:
        yield None if archs is None else row.has_arch in archs, "archs"
    if row.only_arch:
        yield None if archs is None else set(archs) == {row.only_arch}, "archs"
    if row.not_only_arch:
        yield None if archs is None else set(archs) != {row.not_only_arch}, "archs"
    if row.finding:
        yield row.finding in facts.findings, "findings"


def _verdict(row: VariableRule, facts: MachineFacts) -> tuple[bool | None, str]:
    """Whether all conditions hold; None with the reason where that depends on something unknown."""
    results = list(_conditions(row, facts))
    if any(holds is False for holds, _ in results):
        return False, ""
    unknown = {name: facts.reasons.get(name, f"{name} could not be read") for holds, name in results if holds is None}
    return (None, "; ".join(dict.fromkeys(unknown.values()))) if unknown else (True, "")


def _matches(row: VariableRule, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables and values in ``environ`` that a row concerns."""
    if row.together:
        present = {name: environ[name] for name in row.variables if name in environ}
        if _TOGETHER[row.together](present):
            yield ", ".join(present), " | ".join(present.values())
    else:
        yield from (pair for pair in environ.items() if row.names(pair[0]) and _TESTS[row.test](pair[1]))


def _found(environ: Mapping[str, str], facts: MachineFacts) -> Iterator[Decision]:
    """Decisions of the rows that set nothing: for each variable and topic the most severe, certain ones first."""
    found: dict[tuple[str, str], list[tuple[bool, Decision]]] = {}
    for number, row in enumerate(POLICY):
        if row.action == "set":
            continue
        holds, unknown = _verdict(row, facts)
        foreign = facts.is_rocm is False and not row.any_build
        if holds is False and not foreign:
            continue
        for name, value in _matches(row, environ):
            instead = row.instead.replace("*", name.partition("_")[2])
            action, reason, cure = row.action, row.reason.format(instead=instead), row.cure.format(instead=instead)
            if foreign:
                action, cure = "keep", ""
                reason = f"without effect here, this torch is not a ROCm build; on ROCm: {reason}"
            elif holds is None:
                action = "warn" if action == "error" else action
                reason += f" [uncertain here: {unknown}]"
            decision = Decision(variable=name, action=action, value=value, reason=reason, source=row.source, cure=cure)
            found.setdefault((row.topic or str(number), name), []).append((holds is True, decision))
    for rivals in found.values():
        yield max(rivals, key=lambda rival: (rival[0], _SEVERITY[rival[1].action]))[1]


def _to_set(environ: Mapping[str, str], facts: MachineFacts) -> Iterator[Decision]:
    ours = environ.get(MARK_SET, "").split(",")
    for row in POLICY:
        if row.value is None:
            continue
        value = row.value
        holds, unknown = _verdict(row, facts)
        for name in row.variables if holds is not False else ():
            there = environ.get(name)
            if there is not None and not (name in ours and there == value):
                reason = f"the user's value is kept; {value} would be set, because {row.reason}"
                yield Decision(variable=name, action="keep", value=there, reason=reason, source=row.source)
            elif holds:
                yield Decision(variable=name, action="set", value=value, reason=row.reason, source=row.source)
            elif facts.is_rocm:
                reason = f"not set, because it is uncertain whether it is needed ({unknown})"
                cure = f"set {value} if this applies: {row.reason}"
                yield Decision(variable=name, action="info", value=None, reason=reason, source=row.source, cure=cure)


def evaluate(environ: Mapping[str, str], facts: MachineFacts) -> list[Decision]:
    """The decisions of the policy on ``environ``. Changes nothing."""
    made = list(_to_set(environ, facts))
    found = list(_found(environ, facts))
    reported = {decision.variable for decision in made}
    reported |= {name for one in found if one.action != "keep" for name in one.variable.split(", ")}
    for decision in found:
        # "keep" is omitted if another row reports the variable.
        if decision.action != "keep" or decision.variable not in reported:
            reported.add(decision.variable)
            made.append(decision)
    return made


def known_facts() -> MachineFacts | None:
    """The facts of the last evaluation of ``os.environ``, or None."""
    return next(iter(_FACTS.values()), None)


def too_late(decision: Decision) -> Decision:
    """The decision if torch has been imported already: nothing is set."""
    reason = f"too late to set {decision.value}: torch was imported before hf_rocm_tune ({decision.reason})"
    cure = "import hf_rocm_tune first, or set it in the shell"
    return replace(decision, action="warn", value=None, reason=reason, cure=cure)


def remember(decisions: Iterable[Decision]) -> None:
    DECISIONS.extend(one for one in dict.fromkeys(decisions) if one not in DECISIONS)


def apply(
    environ: MutableMapping[str, str] | None = None,
    facts: MachineFacts | None = None,
    *,
    torch_loaded: bool | None = None,
) -> list[Decision]:
    """Evaluate, set variables, and append the decisions to ``DECISIONS``.

    Args:
        environ: ``os.environ`` unless given.
        facts: by default those of the last call on ``os.environ`` with the same filters of visible GPUs, else read now,
            without the GPUs' architectures.
        torch_loaded: torch has been imported and has read its variables: nothing is set.
    """
    environ = os.environ if environ is None else environ
    filters = tuple(environ.get(name) for name in FILTERS)
    if facts is None:
        facts = _FACTS.get(filters) or read_facts()
    elif environ is os.environ:
        _FACTS.clear()
        _FACTS[filters] = facts
    loaded = "torch" in sys.modules if torch_loaded is None else torch_loaded
    made: list[Decision] = []
    for decision in evaluate(environ, facts):
        name, value = decision.variable, decision.value
        if decision.action == "set" and value is not None and name not in environ:
            if loaded:
                decision = too_late(decision)
            else:
                environ[name] = value
                ours = [other for other in environ.get(MARK_SET, "").split(",") if other]
                environ[MARK_SET] = ",".join(dict.fromkeys([*ours, name]))
        made.append(decision)
    remember(made)
    return made


def _assignment(decision: Decision) -> str:
    # Any value must be shown as one line of printable text.
    text = "" if decision.value is None else "=" + decision.value
    plain = "".join(letter if letter.isprintable() else " " for letter in decision.variable + text)
    return plain if len(plain) <= 200 else plain[:200] + "..."


def announce(
    decisions: Iterable[Decision], environ: MutableMapping[str, str] | None = None, stream: TextIO | None = None
) -> None:
    """Print info, warnings and errors on stderr, one line each, once per process tree and by local rank 0 only.

    HF_ROCM_TUNE_QUIET=1 omits info, and ``hf-rocm-tune env`` prints its table instead. Printed lines are noted in
    HF_ROCM_TUNE_TOLD, which child processes (ranks, loader workers) inherit; they print only new lines.
    """
    environ = os.environ if environ is None else environ
    if stream is None:
        stream = None if _prints_table(sys.orig_argv) else sys.stderr
    if stream is None or environ.get("LOCAL_RANK", "").strip() not in ("", "0", "-1"):
        return
    quiet = environ.get("HF_ROCM_TUNE_QUIET", "").strip() == "1"
    told = [mark for mark in environ.get(_MARK_TOLD, "").split(",") if mark]
    for decision in decisions:
        if decision.action not in _LABEL or (quiet and decision.action == "info"):
            continue
        cure = f"; {decision.cure}" if decision.cure else ""
        line = f"{_LABEL[decision.action]}: {_assignment(decision)}: {decision.reason}{cure} ({decision.source})"
        mark = f"{zlib.crc32(line.encode('utf-8', 'surrogateescape')):08x}"
        if mark not in told:
            told.append(mark)
            print(f"hf_rocm_tune: {line}", file=stream)
    if told:
        environ[_MARK_TOLD] = ",".join(told)


def _prints_table(command_line: Sequence[str]) -> bool:
    """Whether a command line asks for the table of all decisions."""
    words = " ".join(PurePath(word).stem for word in command_line)
    return re.search(r"(?:^| )(?:hf-rocm-tune|-m hf_rocm_tune) env(?: --strict)*$", words) is not None


def explain(decisions: Sequence[Decision], facts: MachineFacts | None = None) -> str:
    """A table, the most severe first: action, variable and value, then reason, fix and source below.

    The facts are shown above it, with the reason for each unknown one.
    """
    lines = []
    if facts is not None:
        build = {True: f"a ROCm {facts.hip_version} build", False: "not a ROCm build", None: "build unknown"}
        seen = "unknown" if facts.archs is None else ", ".join(facts.archs) or "none"
        unknown = "; ".join(dict.fromkeys(facts.reasons.values()))
        why = f"unknown: {unknown}; rules that depend on it are marked as uncertain and set nothing\n"
        torch = f"torch {facts.torch_version or 'unknown'}, {build[facts.is_rocm]}"
        lines = [f"{torch}; visible AMD GPUs: {seen}\n{why if unknown else ''}"]
    for one in sorted(decisions, key=lambda one: _ORDER.index(one.action)):
        fix = [f"fix: {one.cure}"] if one.cure else []
        entry = [f"{one.action:<6}{_assignment(one)}", one.reason, *fix, f"source: {one.source}", *one.links]
        lines.append("\n      ".join(entry))
    return "\n".join(lines if decisions else [*lines, "No variable was set, and no existing one needs a change."])


def to_json(decisions: Sequence[Decision]) -> str:
    """The decisions as a JSON array of objects with the fields of ``Decision`` and its links."""
    return json.dumps([asdict(decision) | {"links": list(decision.links)} for decision in decisions], indent=2)


def exports(decisions: Iterable[Decision]) -> str:
    """Shell lines that set the policy's variables, for use before a launcher."""
    made = [(one.variable, one.value) for one in decisions if one.action == "set" and one.value is not None]
    return "".join(f"export {variable}={shlex.quote(value)}\n" for variable, value in made)


# ---- variables of our own ---------------------------------------------------------------------------------------


def read_pairs(variable: str, text: str, keys: Iterable[str], *, required: Mapping[str, str]) -> dict[str, str]:
    """Read ``key=value`` pairs joined by commas, the form of every variable that injects faults.

    Args:
        variable, text: its name, for messages, and its value.
        keys: that are valid.
        required: mandatory keys, and their expected values.

    Raises:
        UsageError: an unknown, repeated or missing key; names the valid ones.
    """
    valid, values = tuple(keys), dict[str, str]()
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        key, separator, value = (piece.strip() for piece in item.partition("="))
        if not separator or key not in valid:
            raise UsageError(f"{variable}: '{item}' is not understood; valid keys: {' '.join(valid)}")
        if key in values:
            raise UsageError(f"{variable}: '{key}' is given twice; give it once")
        values[key] = value
    for key, expected in required.items():
        if key not in values:
            raise UsageError(f"{variable}: '{key}' is missing; give {expected}")
    return values


def read_spec(
    spec: type[Spec],
    variable: str,
    text: str,
    *,
    allowed: Mapping[str, tuple[str, ...]],
    least: Mapping[str, int] | None = None,
    required: Mapping[str, str] | None = None,
) -> Spec:
    """Read a specification of faults: a dataclass from ``key=value`` pairs, a key for each field.

    Args:
        spec: with fields of `str`, `bool` (0 or 1), `float` (0 to 1) and `int`.
        variable, text, required: as for `read_pairs`; required is ``kind`` unless given.
        allowed: the values that a key of text may have.
        least: the least value of a key of a number.

    Raises:
        UsageError: see `read_pairs`; or a value is not valid, with what is.
    """
    hints, values, least = get_type_hints(spec), dict[str, Any](), least or {}
    required = required or {"kind": f"kind= one of {' '.join(allowed['kind'])}"}
    for key, value in read_pairs(variable, text, hints, required=required).items():
        kind = next(one for one in (bool, float, int, str) if one in (hints[key], *get_args(hints[key])))
        try:
            found: Any = value == "1" if kind is bool else kind(value)
        except ValueError:
            found = None
        if key in allowed:
            expected, right = f"one of {' '.join(allowed[key])}", value in allowed[key]
        elif kind is bool:
            expected, right = "0 or 1", value in ("0", "1")
        elif kind is float:
            expected, right = "a number from 0 to 1", found is not None and 0 <= found <= 1
        else:
            expected = f"a whole number from {least[key]} on" if key in least else "a whole number"
            right = found is not None and (key not in least or found >= least[key])
        if not right:
            raise UsageError(f"{variable}: {key}={value} is not valid; expected {expected}")
        values[key] = found
    return spec(**values)


def read_fault(
    spec: type[Spec],
    variable: str,
    environ: Mapping[str, str],
    *,
    by: str,
    kinds: Mapping[str, Collection[str]],
    example: str,
    least: Mapping[str, int] | None = None,
) -> Spec | None:
    """The fault that a variable asks for; None where it is unset or empty.

    Args:
        spec, variable, least: as for `read_spec`; both of the fields ``by`` and ``kind`` have to be given.
        kinds: the values of the field ``by``, and for each those of ``kind``.
        example: for the message.

    Raises:
        UsageError: names what is unknown, missing, given twice or not valid, and what is valid.
    """
    if not (text := environ.get(variable, "").strip()):
        return None
    required = dict.fromkeys((by, "kind"), f"both, for example {example}")
    found: Any = read_spec(spec, variable, text, allowed={by: tuple(kinds)}, least=least, required=required)
    where = getattr(found, by)
    if found.kind not in kinds[where]:
        valid = " ".join(kinds[where])
        raise UsageError(f"{variable}: kind={found.kind} is not valid for {where}; expected one of {valid}")
    return cast("Spec", found)
