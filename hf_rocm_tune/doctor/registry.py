"""All checks, and the choice among them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from hf_rocm_tune.doctor.check import GROUPS, Check
from hf_rocm_tune.doctor.checks import READ_CHECKS
from hf_rocm_tune.doctor.checks.pcie import AFTER_MEASURING
from hf_rocm_tune.doctor.diagnose import in_order
from hf_rocm_tune.doctor.measured.conduct import checks as measured_checks
from hf_rocm_tune.errors import UsageError


def all_checks() -> list[Check]:
    """Every check, in the order in which they run."""
    return in_order([*READ_CHECKS, *measured_checks(), AFTER_MEASURING])


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
        raise UsageError("--only and --skip leave no check to run; ask for less to be left out")
    return chosen


def listing(checks: Sequence[Check]) -> str:
    """The checks by group, with what each finds out."""
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for group, title in GROUPS.items():
        members = [check for check in checks if check.group == group]
        if members:
            lines += ["", f"{group}: {title}"] if lines else [f"{group}: {title}"]
        for check in members:
            lines.append(f"  {check.name:<{width}}  {check.about}{_when(check)}")
    return "\n".join(lines)


def _when(check: Check) -> str:
    notes = ["with --full only"] if check.full else []
    notes += ["on an accelerator"] if check.needs_gpu else []
    notes += [f"with {check.needs_cards} cards"] if check.needs_cards > 1 else []
    return f" ({', '.join(notes)})" if notes else ""
