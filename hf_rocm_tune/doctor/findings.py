"""A check, its input, and its output: rows of knowledge in TOML, and findings.

A row is a table in a file of ``knowledge/`` other than ``DATA_FILES``::

    [aer_errors]
    status = "warn"                 # ok | info | warn | fail
    title = "The PCIe link has counted errors"
    says = "{address} counted {counts} errors since boot"
    cure = "reseat the card, or try another slot; read the counter again under load"
    sources = ["kernel documentation of aer_dev_correctable"]
    confidence = "reported"         # documented | reproduced | reported | general
    needs_cards = 2                 # omitted with fewer discrete cards
    tested_here = true              # false: the text adds that this project has not tested it
    environ = ["peer_copy_failed"]  # findings for the policy of variables

Only a row of status ``ok`` may lack a cure, and every row has a source (tests/doctor/test_rows.py). A new check that
reads needs a function, a `Check` in ``CHECKS`` of its module, and rows; one that measures a function, rows, and a table
``[checks.NAME]`` before them, which names the function.
"""

from __future__ import annotations

import os
import string
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.cards.preflight import DEVICE_ERRORS
from hf_rocm_tune.machine.child import Outcome
from hf_rocm_tune.machine.gpus import GpuNode
from hf_rocm_tune.machine.process import choose, users_environ, visible_nodes
from hf_rocm_tune.machine.software import Software, TorchDevice, read_software
from hf_rocm_tune.machine.survey import Gpu, JoinedDevice, Machine, join, record
from hf_rocm_tune.machine.variables import MARK_SET, MachineFacts

KNOWLEDGE = Path(__file__).parent / "knowledge"
#: Tables of values for checks (`knowledge_data`); all other files have rows.
DATA_FILES = ("kernels.toml", "versions.toml", "thresholds.toml")
NOT_TESTED_HERE = "not tested by this project"

NO_VARIABLES = "the recording has no variables"
NO_SOFTWARE = "the recording has no software"
#: The driver of a device that is assigned to a virtual machine.
GIVEN_AWAY = "vfio-pci"
#: Groups in the order in which they run and are shown. Likely causes come first: variables and the
#: wheel before copies to one card, then its memory, copies between cards, and arithmetic after all copies.
GROUPS: Mapping[str, str] = {
    "access": "Cards and access to them",
    "variables": "Environment variables",
    "software": "Software",
    "kernel": "Kernel and firmware settings",
    "links": "PCI Express",
    "host": "Memory and temperature",
    "transfers": "Measured: transfers",
    "memory": "Measured: the card's memory",
    "pairs": "Measured: between cards",
    "compute": "Measured: arithmetic",
    "after": "After measuring",
}
_TAIL_LINES = 6
_SHOWN_PROBLEMS = 3
_STACK_HEAD = "(most recent call first):"
_UNITS = ((20 << 20, "20 MiB"), (2 << 20, "2 MiB"), (64 << 10, "64 KiB"), (4 << 10, "4 KiB"))

RowStatus = Literal["ok", "info", "warn", "fail"]
Status = Literal["ok", "info", "warn", "fail", "unknown", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One possible finding; ``title``, ``says`` and ``cure`` may have ``{placeholders}``."""

    name: str
    status: RowStatus
    title: str
    says: str
    sources: tuple[str, ...]
    confidence: str
    cure: str = ""
    needs_cards: int = 0
    tested_here: bool = True
    environ: tuple[str, ...] = ()

    @property
    def placeholders(self) -> frozenset[str]:
        parsed = string.Formatter().parse(f"{self.title} {self.says} {self.cure}")
        return frozenset(name for _, name, _, _ in parsed if name is not None)


@cache
def all_rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for file in sorted(KNOWLEDGE.glob("*.toml")):
        if file.name not in DATA_FILES:
            for name, table in knowledge_data(file.name).items():
                if name == "checks":
                    continue
                assert name not in rows, f"{file.name}: there are two rows {name!r}"
                lists = {key: tuple(table.get(key, ())) for key in ("sources", "environ")}
                rows[name] = Row(name=name, **{**table, **lists})
    return rows


@cache
def knowledge_data(file: str) -> dict[str, Any]:
    return tomllib.loads((KNOWLEDGE / file).read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        check: its name, set by the caller of the check.
        row: name of its row; ``environ:VARIABLE`` for the policy of variables; empty for ``unknown`` and ``skipped``,
            whose text is the reason.
        status: ``unknown``: could not be read or measured; ``skipped``: not tried.
        evidence: what was read or measured, one line each.
        cure: what to do, or empty.
        subject: a PCI address, a variable, a pair ``0->1``, if there are several.
        needs_cards: it is omitted with fewer discrete cards.
    """

    check: str
    row: str
    status: Status
    title: str
    text: str
    evidence: tuple[str, ...] = ()
    cure: str = ""
    sources: tuple[str, ...] = ()
    subject: str = ""
    confidence: str = ""
    needs_cards: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"evidence": list(self.evidence), "sources": list(self.sources)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Finding:
        return cls(**values | {"evidence": tuple(values["evidence"]), "sources": tuple(values["sources"])})


def from_row(
    row_name: str, *, check: str = "", subject: str = "", evidence: Iterable[str] = (), **values: object
) -> Finding:
    """A finding with the words of a row.

    Args:
        values: exactly the placeholders of the row; ``address`` and ``device`` are the subject unless given.

    Raises:
        KeyError: there is no such row.
        ValueError: a placeholder has no value, or a value has no placeholder.
    """
    row = all_rows()[row_name]
    values = {name: subject for name in ("address", "device") if name in row.placeholders} | values
    if row.placeholders != values.keys():
        raise ValueError(f"row {row_name!r} takes the values {sorted(row.placeholders)}, got {sorted(values)}")
    text = row.says.format(**values)
    return Finding(
        check=check,
        row=row_name,
        status=row.status,
        title=row.title.format(**values),
        text=text if row.tested_here else f"{text} ({NOT_TESTED_HERE})",
        evidence=tuple(evidence),
        cure=row.cure.format(**values),
        sources=row.sources,
        subject=subject,
        confidence=row.confidence,
        needs_cards=row.needs_cards,
    )


def unknown(reason: str, *, check: str = "", subject: str = "", evidence: Iterable[str] = ()) -> Finding:
    """Something that could not be determined, and why."""
    return replace(
        skipped(reason, check=check, subject=subject),
        status="unknown",
        title="unknown",
        evidence=tuple(evidence),
    )


def skipped(reason: str, *, check: str = "", subject: str = "") -> Finding:
    """A check that was not run, and why."""
    text = " ".join(reason.split())
    return Finding(check=check, row="", status="skipped", title="not run", text=text, subject=subject)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The input of read checks; measured checks use it only to choose devices.

    Attributes:
        software: None in a recording without it.
        environ: the user's variables, without those that this package has set; None in a recording without them.
        recorded: from a file, so nothing can be measured.
    """

    machine: Machine
    software: Software | None
    environ: Mapping[str, str] | None
    recorded: bool = False

    @property
    def cards(self) -> tuple[Gpu, ...]:
        """The discrete AMD cards that are this system's, in PCI order."""
        return tuple(gpu for gpu in self.machine.cards if gpu.driver.value != GIVEN_AWAY)

    @property
    def candidates(self) -> tuple[Gpu, ...]:
        """GPUs for training: the discrete AMD cards, or integrated GPUs if there is no card."""
        discrete = tuple(gpu for gpu in self.machine.amd if gpu.integrated is not True)
        return tuple(gpu for gpu in discrete if gpu.driver.value != GIVEN_AWAY) or discrete or self.machine.amd

    @property
    def build(self) -> str | None:
        """torch's build; None if unknown."""
        return self.software.build if self.software else None

    @property
    def variables(self) -> Mapping[str, str]:
        """The known variables."""
        return self.environ or {}

    @property
    def devices(self) -> tuple[TorchDevice, ...]:
        """torch's devices; empty if unknown."""
        return (self.software.devices.value or ()) if self.software else ()

    @property
    def card_count(self) -> int:
        """Number of discrete cards of any vendor: in the kernel's list, or torch's if that is larger."""
        return max(len(self.cards), len(self.seen_cards))

    @property
    def seen_cards(self) -> tuple[TorchDevice, ...]:
        """torch's devices without integrated GPUs."""
        return tuple(one.device for one in self.joined if one.gpu is None or one.gpu.integrated is not True)

    @property
    def joined(self) -> tuple[JoinedDevice, ...]:
        """torch's devices, each with its card in the kernel's list."""
        topology = self.machine.topology
        # Torch was queried by a process of this package, which sees all discrete cards unless the user filters them.
        shown = choose(topology.nodes, self.variables, complete=topology.complete, split=True).variables
        return join(self.machine, self.devices, {**self.variables, **shown})

    @property
    def visible(self) -> tuple[GpuNode, ...] | None:
        """The compute nodes that pass the user's filters; None if unknown."""
        topology = self.machine.topology
        known = topology.complete and self.environ is not None
        return visible_nodes(topology.nodes, self.variables) if known else None

    def facts(self, findings: frozenset[str] = frozenset()) -> MachineFacts:
        """The facts for the policy of variables, with findings such as ``peer_copy_failed``."""
        reasons: dict[str, str] = {}
        software, visible = self.software, self.visible
        torch_version = software.torch_version.value if software else None
        if torch_version is None:
            why = software.torch_version.reason if software else NO_SOFTWARE
            reasons |= {"torch_version": why, "hip_version": why}
        unread = software.package_problems.get("flash_attn") if software else NO_SOFTWARE
        if unread:
            reasons["flash_attn_version"] = unread
        if self.environ is None:
            reasons["archs"] = NO_VARIABLES
        elif visible is None:
            unfiltered = "the filter of visible GPUs is not a plain list of indices"
            reasons["archs"] = "; ".join(self.machine.topology.reasons) or unfiltered
        return MachineFacts(
            torch_version=torch_version,
            hip_version=software.hip_version if software else None,
            archs=None if visible is None else tuple(node.arch for node in visible),
            flash_attn_version=software.packages.get("flash_attn") if software else None,
            findings=findings,
            reasons=reasons,
        )


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's variables, without those set by this package or its parent process."""
    ours = {name for name in environ.get(MARK_SET, "").split(",") if name}
    return {name: value for name, value in users_environ(environ).items() if name not in ours and name != MARK_SET}


def read_here() -> tuple[Evidence, dict[str, Any]]:
    """This machine's evidence, and the recording of what was read."""
    machine, recording = record()
    return Evidence(machine=machine, software=read_software(), environ=own_environ(os.environ)), recording


@dataclass(frozen=True)
class Check:
    """One check: one that reads gives findings by ``run``, one that measures by ``function``, see `diagnose`.

    Attributes:
        name: for ``--only`` and ``--skip``.
        group: a key of ``GROUPS``.
        about: its purpose, one line.
        run: returns findings, also ``ok`` ones, and none if it is not applicable.
        measured: it needs an accelerator that torch sees, and is not possible on a recording.
        full: it is slow, and only ``--full`` runs it.
        needs_cards: it is omitted with fewer discrete cards.
        seconds: its usual time.
        function: ``module.function`` in this package, ``function(request) -> list[Finding] | Again``.
        deadline_s: seconds after which a child is killed.
        faults: kinds for ``request["fault"]["kind"]``, in addition to those of every child.
        options: added to the request.
    """

    name: str
    group: str
    about: str
    run: Callable[[Evidence], Iterable[Finding]] | None = None
    measured: bool = False
    full: bool = False
    needs_cards: int = 0
    seconds: float = 0.0
    function: str = ""
    deadline_s: float = 120
    faults: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def arch_of(gpu: Gpu) -> str | None:
    """The architecture in the kernel's list, or that of its model."""
    return gpu.arch or (gpu.identity.card.arch if gpu.identity.card else None)


def in_wheels(gpu: Gpu) -> bool:
    """Whether wheels of torch have code for an integrated GPU; True for a card, whose check is `arch`."""
    return gpu.integrated is not True or arch_of(gpu) in knowledge_data("versions.toml")["integrated"]["in_wheels"]


@dataclass(frozen=True, kw_only=True)
class Again:
    """Findings that a second child with other variables may refine; a process reads those only once.

    Attributes:
        findings: used if the second child gives no result.
        environ: additional variables; None removes one.
        request: additional entries; the second child gets `findings` as ``request["first"]`` and returns all of them.
        words: "with HSA_ENABLE_SDMA=0".
    """

    findings: list[Finding]
    environ: Mapping[str, str | None]
    words: str
    request: Mapping[str, Any] = field(default_factory=dict)


def with_evidence(findings: Iterable[Finding], line: str) -> list[Finding]:
    """Findings with one more line of evidence each, but for those that are all right."""
    return [one if one.status == "ok" else replace(one, evidence=(*one.evidence, line)) for one in findings]


def failure(what: str, outcome: Outcome, *, subject: str) -> Finding:
    """The finding on a child that hung, died or left garbage, by what it was to find out and of what (`subject`)."""
    evidence = [f"the measuring process {outcome.how}", *_printed(outcome)]
    if outcome.error.startswith("OutOfMemoryError"):
        return unknown(f"not enough memory is free: {outcome.error}", subject=subject, evidence=evidence)
    if outcome.error and not outcome.error.startswith(DEVICE_ERRORS):
        why = f"the measuring process {outcome.how}: a bug of ours, or a broken installation"
        return unknown(why, subject=subject, evidence=evidence)
    if outcome.status == "timeout":
        row = "measurement_hung"
    elif outcome.status == "garbage":
        row = "measurement_garbage"
    else:
        row = "measurement_refused" if outcome.error else "measurement_killed"
    return from_row(row, subject=subject, evidence=evidence, what=what, how=outcome.how)


def _printed(outcome: Outcome) -> list[str]:
    """The relevant part of its output: the innermost calls of a hang, else the end."""
    lines = [line.strip() for line in outcome.tail.splitlines() if line.strip()]
    stacks = [number for number, line in enumerate(lines) if line.endswith(_STACK_HEAD)]
    if outcome.status == "timeout" and stacks:
        return lines[stacks[-1] + 1 :][:_TAIL_LINES]
    return lines[-_TAIL_LINES:]


def problem_lines(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line each for the first few problems: the case, and its damage if the readback showed any."""
    lines = []
    for problem in problems[:_SHOWN_PROBLEMS]:
        damage = problem.get("damage")
        lines.append(f"{problem['case']}: {_damage_words(damage) if damage else 'correct when read back'}")
    left = len(problems) - _SHOWN_PROBLEMS
    return [*lines, f"and {left} more"] if left > 0 else lines


def _damage_words(damage: Mapping[str, Any]) -> str:
    """One line about a ``Damage``: how much, where, how aligned, and what is there instead."""
    wrong, first = damage["wrong"], damage["first_offset"]
    kinds = {
        "zeros": "zeros",
        "poison": "poison (never written)",
        "stale": "of an earlier transfer",
        "flips": "differ in one bit",
    }
    shares = [f"{100 * damage[k] / wrong:.0f} % {words}" for k, words in kinds.items() if damage[k] / wrong >= 0.01]
    unit = next((words for size, words in _UNITS if damage["alignment"] >= size), None)
    aligned = "" if unit is None else f" ({'' if first else 'the run is '}a multiple of {unit})"
    return (
        f"{wrong:,} of {damage['nbytes']:,} bytes wrong, the first at offset {first:,}{aligned}, in a run of "
        f"{damage['length']:,}; {', '.join(shares) or 'other bytes'}; found {damage['found']} instead of "
        f"{damage['right']}"
    )


def size_words(nbytes: float) -> str:
    for unit, words in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {words}"
    return f"{nbytes:.0f} bytes"
