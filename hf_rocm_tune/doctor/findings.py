"""A check, its input and its output.

A check is a function that yields findings, with the sentence beside the test that leads to it: what was read, what
follows, what to do, and a source that a reader can look up. One that reads takes the `Evidence` and stands in the
``CHECKS`` of its file; one that measures takes a request and runs in a child process, see `diagnose`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.cards.preflight import DEVICE_ERRORS
from hf_rocm_tune.machine.child import Outcome
from hf_rocm_tune.machine.process import users_environ
from hf_rocm_tune.machine.software import Software, TorchDevice, read_software
from hf_rocm_tune.machine.survey import Gpu, Machine, survey

GIVEN_AWAY = "vfio-pci"
"""The driver of a device that is assigned to a virtual machine."""
GROUPS: Mapping[str, str] = {
    "access": "Cards and access",
    "variables": "Environment variables",
    "software": "Software",
    "kernel": "Kernel and firmware",
    "links": "PCI Express",
    "host": "Memory, temperature",
    "transfers": "Measured: transfers",
    "memory": "Measured: memory",
    "pairs": "Measured: pairs",
    "compute": "Measured: arithmetic",
    "after": "After measuring",
}
"""In the order in which they run and are shown: likely causes come first, arithmetic after all copies."""

Status = Literal["ok", "info", "warn", "fail", "unknown", "skipped"]
_TAIL_LINES = 6
_SHOWN_PROBLEMS = 3
_UNITS = ((20 << 20, "20 MiB"), (2 << 20, "2 MiB"), (64 << 10, "64 KiB"), (4 << 10, "4 KiB"))


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis. ``unknown``: could not be read or measured; ``skipped``: not tried."""

    status: Status
    row: str  # its name for programs, environ:VARIABLE for variables; empty for unknown and skipped
    title: str  # the fact in a few words
    text: str  # what it means; of unknown and skipped, the reason
    fix: str = ""
    source: str = ""  # issues and documents, separated by semicolons
    subject: str = ""  # a PCI address, a variable, a pair cuda:0->cuda:1, if there are several
    read: Sequence[str] = ()  # what was read or measured, one line each
    check: str = ""  # its name, set by the caller of the check

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


note = partial(Finding, "info")
"""Worth knowing, with nothing to do for a run."""
warn = partial(Finding, "warn")
"""Training may be slow, or fail later."""
fail = partial(Finding, "fail")
"""The result of a training cannot be trusted."""


def ok(row: str, title: str, text: str, source: str, *, subject: str = "", read: Sequence[str] = ()) -> Finding:
    """In order; ``title`` stands in the line of its group."""
    return Finding("ok", row, title, text, "", source, subject, read)


def unknown(reason: str, *, subject: str = "", read: Sequence[str] = ()) -> Finding:
    """Something that could not be determined, and why."""
    return Finding("unknown", "", "unknown", " ".join(reason.split()), subject=subject, read=read)


def skipped(reason: str) -> Finding:
    """A check that was not run, and why."""
    return Finding("skipped", "", "not run", " ".join(reason.split()))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The input of read checks; measured checks use it only to choose devices."""

    machine: Machine
    software: Software
    environ: Mapping[str, str]  # the user's variables, without a choice of cards by this package
    root: Path = Path("/")  # where the kernel's files were read

    @property
    def cards(self) -> tuple[Gpu, ...]:
        """The discrete AMD cards that are this system's, in PCI order."""
        return tuple(gpu for gpu in self.machine.amd if gpu.integrated is False and gpu.driver != GIVEN_AWAY)

    @property
    def candidates(self) -> tuple[Gpu, ...]:
        """GPUs for training: the discrete AMD cards, or integrated GPUs if there is no card."""
        discrete = tuple(gpu for gpu in self.machine.amd if gpu.integrated is not True)
        return tuple(gpu for gpu in discrete if gpu.driver != GIVEN_AWAY) or discrete or self.machine.amd

    @property
    def devices(self) -> tuple[TorchDevice, ...]:
        """torch's devices; empty if unknown."""
        return self.software.devices or ()

    @property
    def joined(self) -> list[tuple[TorchDevice, Gpu | None]]:
        """torch's devices, each with its card in the kernel's list."""
        by_address = {gpu.address: gpu for gpu in self.machine.gpus}
        return [(device, by_address.get((device.pci_address or "").lower())) for device in self.devices]

    @property
    def archs(self) -> dict[str, str]:
        """Architectures of the GPUs for training by address; by torch's name where the kernel lists none, as in WSL."""
        listed = {gpu.address: gpu.arch for gpu in self.candidates if gpu.arch}
        return listed if self.candidates else {device.name: device.arch for device in self.devices}

    @property
    def seen_cards(self) -> tuple[TorchDevice, ...]:
        """torch's devices without integrated GPUs."""
        return tuple(device for device, gpu in self.joined if gpu is None or gpu.integrated is not True)

    @property
    def card_count(self) -> int:
        """Number of discrete cards of any vendor: in the kernel's list, or torch's if that is larger."""
        return max(len(self.cards), len(self.seen_cards))


def read_here() -> Evidence:
    """This machine's evidence."""
    return Evidence(machine=survey(), software=read_software(), environ=users_environ(os.environ))


@dataclass(frozen=True)
class Check:
    """One check: one that reads gives findings by ``run``, one that measures by ``measure``, see `diagnose`."""

    name: str  # for --only
    group: str  # a key of GROUPS
    about: str  # its purpose, one line
    run: Callable[[Evidence], Iterable[Finding]] | None = None  # yields none if it is not applicable
    needs_cards: int = 0  # it is omitted with fewer discrete cards
    measure: str = ""  # module.function in this package, function(request) -> list[Finding]
    deadline_s: float = 90  # of a child; `full_deadline_s` with --full
    full_deadline_s: float = 120
    options: Mapping[str, Any] = field(default_factory=dict)  # added to the request
    full: Mapping[str, Any] = field(default_factory=dict)  # those of --full, over them
    # Variables with which a second child repeats a check that fails on ROCm, to find the cause; None removes one.
    again: Mapping[str, str | None] = field(default_factory=dict)


# ---- words that measured checks share ------------------------------------------------------------------------------


def failure(what: str, outcome: Outcome, *, subject: str) -> Finding:
    """The finding on a child that hung, died or left garbage, by what it was to find out and of what (`subject`)."""
    how = f"the measuring process {outcome.how}"
    tail = [line.strip() for line in outcome.tail.splitlines() if line.strip()]
    read = [how, *tail[-_TAIL_LINES:]]
    if outcome.error.startswith("OutOfMemoryError"):
        return unknown(f"not enough memory is free: {outcome.error}", subject=subject, read=read)
    if outcome.error and not outcome.error.startswith(DEVICE_ERRORS):
        return unknown(f"{how}: a bug of ours, or a broken installation", subject=subject, read=read)
    text = f"{what}: {how}"
    if outcome.error:
        row = "measurement_refused"
        title = "The device refused a measurement"
        fix = "see the findings on software and access first: a wheel without this architecture, a missing permission"
        source = "TheRock#5543; TheRock RELEASES.md; uv#21683"
        return fail(row, title, text, fix, source, subject=subject, read=read)
    row = "measurement_died"
    title = "A measurement's process died or left no result"
    fix = "look for amdgpu lines in `dmesg` (a page fault, a reset, `Out of memory`); run this check alone (--only)"
    if outcome.status == "timeout":
        row = "measurement_hung"
        title = "A measurement did not return"
        text += ", and was killed. Such a driver or card hangs in training, too"
    return fail(row, title, text, fix, "ROCm/amdgpu#225", subject=subject, read=read)


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def problem_lines(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line each for the first few problems: the case, and its damage if the readback showed any."""
    lines = []
    for problem in problems[:_SHOWN_PROBLEMS]:
        damage = problem.get("damage")
        what = _damage_words(damage) if damage else "correct when read back"
        lines.append(f"{problem['case']}: {what}")
    left = len(problems) - _SHOWN_PROBLEMS
    if left > 0:
        lines.append(f"and {left} more")
    return lines


def _damage_words(damage: Mapping[str, Any]) -> str:
    """One line about a ``Damage``: how much, where, how aligned, and what is there instead."""
    wrong = damage["wrong"]
    first = damage["first_offset"]
    kinds = {
        "zeros": "zeros",
        "poison": "poison (never written)",
        "stale": "of an earlier transfer",
        "flips": "differ in one bit",
    }
    shares = []
    for kind, words in kinds.items():
        share = damage[kind] / wrong
        if share >= 0.01:
            shares.append(f"{100 * share:.0f} % {words}")
    aligned = ""
    unit = next((words for size, words in _UNITS if damage["alignment"] >= size), None)
    if unit is not None:
        aligned = f" (a multiple of {unit})" if first else f" (the run is a multiple of {unit})"
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
