"""Evaluates the rows on this process, and sets what is to be set where the user has not."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace

from hf_rocm_tune.machine.facts import MachineFacts, read_facts
from hf_rocm_tune.machine.links import links_of
from hf_rocm_tune.machine.policy import POLICY
from hf_rocm_tune.machine.rows_runtime import VISIBLE
from hf_rocm_tune.machine.rules import Action, Row, Versions

# Inherited by child processes: which variables are ours and not the user's.
MARK_SET = "HF_ROCM_TUNE_SET"

_SEVERITY: dict[Action, int] = {"error": 3, "warn": 2, "info": 1, "keep": 0, "set": 0}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided on one variable.

    Attributes:
        variable: its name; several, with commas, where the row is about their combination.
        action: ``set``, ``keep``, ``info``, ``warn`` or ``error``. In all but ``set`` the user's value stands.
        value: the value that holds now; None where the variable is unset.
        reason: one line: what is the case.
        source: on whose word, several with semicolons.
        cure: one line: what to do; empty where nothing is to be done.
    """

    variable: str
    action: Action
    value: str | None
    reason: str
    source: str
    cure: str = ""

    @property
    def links(self) -> tuple[str, ...]:
        """Addresses of those sources that have a certain one."""
        return links_of(self.source)


DECISIONS: list[Decision] = []
# What was read of this machine, under the filters of visible GPUs that held then.
_FACTS: dict[tuple[str | None, ...], MachineFacts] = {}


def _release(version: str) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(numbers.group(1)), int(numbers.group(2) or 0)) if numbers else None


def _within(version: str | None, wanted: Versions, unknown: bool) -> bool | None:
    release = _release(version) if version else None
    if release is None:
        return None if unknown or version else False
    low, high = (None if bound is None else _release(bound) for bound in wanted)
    return (low is None or release >= low) and (high is None or release < high)


def _conditions(row: Row, facts: MachineFacts) -> Iterator[tuple[bool | None, str]]:
    """Each condition of a row: whether it holds (None: not known), and the field of the facts that it hangs on."""
    if not row.any_build:
        yield facts.is_rocm, "hip_version"
    if row.torch is not None:
        yield _within(facts.torch_version, row.torch, True), "torch_version"
    if row.torch_releases:
        release = _release(facts.torch_version or "")
        listed = release in [_release(wanted) for wanted in row.torch_releases]
        yield None if release is None else listed, "torch_version"
    if row.rocm is not None:
        yield _within(facts.hip_version, row.rocm, "hip_version" in facts.reasons), "hip_version"
    if row.flash_attn is not None:
        unknown = "flash_attn_version" in facts.reasons
        yield _within(facts.flash_attn_version, row.flash_attn, unknown), "flash_attn_version"
    if row.has_arch is not None:
        yield None if facts.archs is None else row.has_arch in facts.archs, "archs"
    if row.only_arch is not None:
        yield None if facts.archs is None else set(facts.archs) == {row.only_arch}, "archs"
    if row.not_only_arch is not None:
        yield None if facts.archs is None else set(facts.archs) != {row.not_only_arch}, "archs"
    if row.finding is not None:
        yield row.finding in facts.findings, "findings"


def _verdict(row: Row, facts: MachineFacts) -> tuple[bool | None, str]:
    """Whether all conditions hold; None with the reason where that hangs on something unknown."""
    results = list(_conditions(row, facts))
    if any(holds is False for holds, _ in results):
        return False, ""
    unknown = {name: facts.reasons.get(name, f"{name} could not be read") for holds, name in results if holds is None}
    return (None, "; ".join(dict.fromkeys(unknown.values()))) if unknown else (True, "")


def _stem(pattern: str, name: str) -> str | None:
    """What ``*`` stands for in ``name``; empty for an equal name; None where the pattern does not fit."""
    head, star, tail = pattern.partition("*")
    fits = name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail)
    if not star:
        return "" if name == pattern else None
    return name[len(head) : len(name) - len(tail)] if fits else None


def covers(name: str) -> bool:
    """Whether the policy has a row on a variable."""
    return any(_stem(pattern, name) is not None for row in POLICY for pattern in row.variables)


def _matches(row: Row, environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Variable, value and replacement name for each thing in ``environ`` that a row speaks of."""
    if row.together is not None:
        present = {name: environ[name] for name in row.variables if name in environ}
        if row.together(present):
            yield ", ".join(present), " | ".join(present.values()), ""
        return
    for name, value in environ.items():
        stems = [stem for pattern in row.variables if (stem := _stem(pattern, name)) is not None]
        if stems and row.test(value):
            yield name, value, (row.instead or "").replace("*", stems[0])


def _speak(environ: Mapping[str, str], facts: MachineFacts) -> Iterator[Decision]:
    """Decisions of the rows that set nothing: for each variable the gravest of each topic, certain ones first."""
    found: dict[tuple[str, str], list[tuple[bool, Decision]]] = {}
    for number, row in enumerate(POLICY):
        if row.action == "set":
            continue
        holds, unknown = _verdict(row, facts)
        foreign = facts.is_rocm is False and not row.any_build
        if holds is False and not foreign:
            continue
        for name, value, instead in _matches(row, environ):
            action, reason, cure = row.action, row.reason.format(instead=instead), row.cure.format(instead=instead)
            if foreign:
                action, cure = "keep", ""
                reason = f"of no concern here, this torch is not a ROCm build; on ROCm: {reason}"
            elif holds is None:
                action = "warn" if action == "error" else action
                reason += f" [not certain here: {unknown}]"
            decision = Decision(variable=name, action=action, value=value, reason=reason, source=row.source, cure=cure)
            found.setdefault((row.topic or str(number), name), []).append((holds is True, decision))
    for rivals in found.values():
        yield max(rivals, key=lambda rival: (rival[0], _SEVERITY[rival[1].action]))[1]


def _set(environ: Mapping[str, str], facts: MachineFacts) -> Iterator[Decision]:
    ours = environ.get(MARK_SET, "").split(",")
    for row in POLICY:
        if row.action != "set" or row.value is None:
            continue
        value = row.value
        holds, unknown = _verdict(row, facts)
        for name in row.variables if holds is not False else ():
            there = environ.get(name)
            inherited = name in ours and there == value
            if there is not None and not inherited:
                reason = f"the user's value is kept; {value} would be set, because {row.reason}"
                yield Decision(variable=name, action="keep", value=there, reason=reason, source=row.source)
            elif holds:
                yield Decision(variable=name, action="set", value=value, reason=row.reason, source=row.source)
            elif facts.is_rocm:
                reason = f"not set, because it is not certain that it is needed ({unknown})"
                cure = f"set {value} if this is so: {row.reason}"
                yield Decision(variable=name, action="info", value=None, reason=reason, source=row.source, cure=cure)


def evaluate(environ: Mapping[str, str], facts: MachineFacts) -> list[Decision]:
    """What the policy says of ``environ`` on this machine. Changes nothing."""
    made = list(_set(environ, facts))
    said = list(_speak(environ, facts))
    spoken_of = {decision.variable for decision in made}
    spoken_of |= {name for one in said if one.action != "keep" for name in one.variable.split(", ")}
    for decision in said:
        # What only says that a variable is kept adds nothing where another row has spoken of it.
        if decision.action != "keep" or decision.variable not in spoken_of:
            spoken_of.add(decision.variable)
            made.append(decision)
    return made


def known_facts() -> MachineFacts | None:
    """On what ground ``os.environ`` was judged last; None where it was not."""
    return next(iter(_FACTS.values()), None)


def too_late(decision: Decision) -> Decision:
    """The same decision where torch has been imported already: nothing is set, and that is said."""
    reason = f"too late to set {decision.value}: torch was imported before hf_rocm_tune ({decision.reason})"
    cure = "import hf_rocm_tune first, or set it in the shell"
    return replace(decision, action="warn", value=None, reason=reason, cure=cure)


def remember(decisions: Iterable[Decision]) -> None:
    """Add to ``DECISIONS`` what is not in it yet."""
    for decision in decisions:
        if decision not in DECISIONS:
            DECISIONS.append(decision)


def apply(
    environ: MutableMapping[str, str] | None = None,
    facts: MachineFacts | None = None,
    *,
    torch_loaded: bool | None = None,
) -> list[Decision]:
    """Evaluate, set what is to be set, and remember the decisions in ``DECISIONS``.

    Args:
        environ: ``os.environ`` unless given.
        facts: unless given, those of the last call on ``os.environ``; without one, or where another filter of visible
            GPUs was set since, they are read anew, without the GPUs' architectures.
        torch_loaded: whether torch is imported already, and has read its variables; then nothing is set.
    """
    environ = os.environ if environ is None else environ
    filters = tuple(environ.get(name) for name in VISIBLE)
    if facts is None:
        facts = _FACTS.get(filters) or read_facts()
    elif environ is os.environ:
        _FACTS.clear()
        _FACTS[filters] = facts
    loaded = "torch" in sys.modules if torch_loaded is None else torch_loaded
    made: list[Decision] = []
    for decision in evaluate(environ, facts):
        name, value = decision.variable, decision.value
        missing = decision.action == "set" and name not in environ
        if missing and loaded:
            decision = too_late(decision)
        elif missing and value is not None:
            environ[name] = value
            ours = [other for other in environ.get(MARK_SET, "").split(",") if other]
            environ[MARK_SET] = ",".join(dict.fromkeys([*ours, name]))
        made.append(decision)
    remember(made)
    return made
