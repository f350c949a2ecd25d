"""All checks, the choice among them, and running them: none stops another, and what was not run is said with why."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hf_rocm_tune.doctor import access, measured, pcie, software, system
from hf_rocm_tune.doctor.evidence import GROUPS, Check, Evidence, read_here
from hf_rocm_tune.doctor.findings import Finding, all_rows, from_row, skipped
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.variables import evaluate

NOTHING_THERE = "there is nothing of the kind on this machine"
MEASURE_SECONDS = 10.0
"""What the measured checks of `quick` may take together, by their own estimates."""
ASK_SECONDS = 20.0
"""After which `quick` no longer waits for torch; it answers within a few seconds as a rule."""
_HUNG = ("measurement_hung", "pair_hung")
_ENOUGH_HANGS = 2


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, in order of groups and checks.

    Attributes:
        findings: what was found, and what was not run or not found out.
        seconds: of each check that ran, by name.
    """

    findings: tuple[Finding, ...]
    seconds: dict[str, float]

    @property
    def exit_code(self) -> int:
        """0 fine, 1 warnings, 2 failures. What was not run or not found out counts as neither."""
        return 2 if self.count("fail") else 1 if self.count("warn") else 0

    def count(self, status: str) -> int:
        """How many findings have a status."""
        return sum(finding.status == status for finding in self.findings)


def all_checks() -> list[Check]:
    """Every check, in the order in which they run."""
    read = (*access.CHECKS, *software.CHECKS, *system.CHECKS, *pcie.CHECKS)
    return in_order([*read, *measured.checks()])


def in_order(checks: Iterable[Check]) -> list[Check]:
    """Checks in the order of their groups; within a group as they come."""
    places = list(GROUPS)
    return sorted(checks, key=lambda check: places.index(check.group))


def select(checks: Sequence[Check], *, only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[Check]:
    """Those that are asked for.

    Args:
        checks: to choose from.
        only: names of checks or groups, a name that is both means the group; all where none is given.
        skip: names of checks or groups that are left out.

    Raises:
        UsageError: there is no check or group of a name, or nothing is left.
    """
    wanted, unwanted = set(only), set(skip)
    names = [*dict.fromkeys(check.group for check in checks), *(check.name for check in checks)]
    for name in sorted(wanted | unwanted):
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            raise UsageError(f"there is no check or group {name!r}: {hint}`hf-rocm-tune doctor --list` names them all")
    chosen = [check for check in checks if not wanted or {check.name, check.group} & wanted]
    chosen = [check for check in chosen if not {check.name, check.group} & unwanted]
    if not chosen:
        raise UsageError("--only and --skip leave no check to run; leave less out")
    return chosen


def listing(checks: Sequence[Check]) -> str:
    """The checks by group, with what each finds out."""
    width = max(len(check.name) for check in checks)
    blocks = []
    for group, title in GROUPS.items():
        lines = []
        for check in (one for one in checks if one.group == group):
            notes = ["with --full only"] if check.full else []
            notes += ["on an accelerator"] if check.needs_gpu else []
            notes += [f"with {check.needs_cards} cards"] if check.needs_cards > 1 else []
            lines.append(f"  {check.name:<{width}}  {check.about}" + (f" ({', '.join(notes)})" if notes else ""))
        blocks += ["\n".join([f"{group}: {title}", *lines])] if lines else []
    return "\n\n".join(blocks)


def diagnose(
    evidence: Evidence,
    checks: Sequence[Check],
    *,
    full: bool = False,
    on_check: Callable[[Check], None] = lambda check: None,
) -> Diagnosis:
    """Run the checks that can run here.

    Args:
        evidence: see `Evidence`.
        checks: in any order.
        full: run long checks as well.
        on_check: called before each check that runs.
    """
    findings: list[Finding] = []
    seconds: dict[str, float] = {}
    for check in in_order(checks):
        if evidence.card_count < check.needs_cards:
            continue
        if why_not := _why_not(check, evidence, findings, full=full):
            findings.append(skipped(why_not, check=check.name))
            continue
        on_check(check)
        began = time.monotonic()
        made = [finding for finding in _run(check, evidence) if finding.needs_cards <= evidence.card_count]
        seconds[check.name] = round(time.monotonic() - began, 3)
        findings += made or [skipped(NOTHING_THERE, check=check.name)]
    findings += _variables_for(evidence, findings)
    return Diagnosis(findings=tuple(findings), seconds=seconds)


def quick(evidence: Evidence | None = None, *, measure_seconds: float = MEASURE_SECONDS) -> list[Finding]:
    """Find out in a few seconds whether this machine is fit to train. Never raises for what it finds.

    Call it in one process of a job, before that process fills the card: what is measured is measured in children.

    Args:
        evidence: read from this machine unless given.
        measure_seconds: what measuring may take; 0 leaves it out.

    Returns:
        The findings, without those on checks that were not run.
    """
    known = read_here(deadline_s=ASK_SECONDS)[0] if evidence is None else evidence
    done = diagnose(known, affordable(all_checks(), known, measure_seconds))
    return [finding for finding in done.findings if finding.status != "skipped"]


def affordable(checks: list[Check], evidence: Evidence, measure_seconds: float) -> list[Check]:
    """All checks that read, and the quickest of those that measure, as long as they fit in the time given."""
    chosen = [check for check in checks if not check.measured]
    left = measure_seconds
    short = [check for check in checks if check.measured and not check.full]
    for check in sorted(short, key=lambda one: one.seconds):
        # A check of single cards takes its time on each of them.
        seconds = check.seconds * (1 if check.needs_cards > 1 else max(evidence.card_count, 1))
        if check.needs_cards <= evidence.card_count and seconds <= left:
            left -= seconds
            chosen.append(check)
    return chosen


def _run(check: Check, evidence: Evidence) -> list[Finding]:
    found: list[Finding] = []
    try:
        for finding in check.run(evidence):
            found.append(replace(finding, check=check.name))
    except Exception as error:  # a bug of ours in one check must not hide what the others find; it is reported as such
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        found.append(from_row("check_crashed", check=check.name, name=check.name, error=what))
    return found


def _why_not(check: Check, evidence: Evidence, findings: Iterable[Finding], *, full: bool) -> str:
    """Why a check cannot run or is not to; empty where it runs."""
    if not check.measured:
        return ""
    if evidence.recorded:
        return "recorded: nothing can be measured on a machine that is not here"
    if check.needs_gpu and not evidence.devices:
        known = evidence.software
        why = "nothing is known of the software" if known is None else known.devices.reason
        return f"torch sees no accelerator: {why or f'torch {known and known.torch_version.value} lists no device'}"
    if check.needs_cards > len(evidence.seen_cards):
        return f"torch sees {len(evidence.seen_cards)} of {evidence.card_count} cards"
    if check.full and not full:
        seconds = check.seconds
        takes = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
        return f"takes about {takes}; --full runs it"
    # Every hang takes minutes, and a driver that hung in two checks hangs on.
    hung = dict.fromkeys(finding.check for finding in findings if finding.row in _HUNG)
    if check.group == "after" or len(hung) < _ENOUGH_HANGS:
        return ""
    return f"{' and '.join(hung)} did not return; --only {check.name} measures it all the same"


def _variables_for(evidence: Evidence, findings: Iterable[Finding]) -> list[Finding]:
    """What the policy of variables adds when it is told what was found: for example that RCCL should not use peers."""
    rows = all_rows()
    names = {name for finding in findings if finding.row in rows for name in rows[finding.row].environ}
    if not names:
        return []
    before = evaluate(evidence.variables, evidence.facts())
    new = [one for one in evaluate(evidence.variables, evidence.facts(frozenset(names))) if one not in before]
    # Two cards that want different values of one variable: there is no line to print, and each finding says its own.
    values = {name: {one.value for one in new if one.variable == name} for name in {one.variable for one in new}}
    return [access.of_decision(one, found=True) for one in new if len(values[one.variable]) == 1]
