"""The parent's side of every check of arithmetic: findings from what `tally` has counted. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row
from hf_rocm_tune.doctor.measured.conduct import Ask, failure

_SHOWN = 3

Judge = Callable[[str, Mapping[str, Any], Mapping[str, Any]], list[Finding]]
"""Name of the check, result and request to findings."""


def conducted(ask: Ask, request: Mapping[str, Any], judge: Judge) -> list[Finding]:
    """One child, judged under the name of the check that asked: several checks may share a module."""
    outcome = ask()
    if outcome.result is None:
        return [failure(ask, outcome)]
    return judge(ask.measured.name, outcome.result, request)


def verdict(
    check: str,
    result: Mapping[str, Any],
    request: Mapping[str, Any],
    *,
    right: str,
    wrong: str,
    evidence: Iterable[str] = (),
    **values: object,
) -> Finding:
    """The finding on the results of a check.

    Args:
        check: its name.
        result: of `tally.Tally.result`.
        request: what was asked.
        right, wrong: rows for all right, and for something wrong; both take ``device``, ``cases`` and ``values``, and
            the latter ``wrong``. A result that reads back in two ways has a row of its own, and so has one that the
            device refused to compute where nothing else is wrong.
        evidence: more lines, behind those on what is wrong.
        values: further placeholders of both rows.
    """
    device = request["device"]
    counted = {"device": device, "cases": f"{result['cases']:,}", **values}
    if not result["wrong"]:
        lines = [_compared(result), *evidence]
        return from_row(check, right, subject=device, evidence=lines, **counted)
    lines = [*problem_lines(result), *evidence]
    if not all(problem.get("reads_agree", True) for problem in result["problems"]):
        return from_row(check, "arithmetic_read_back", subject=device, evidence=lines, device=device)
    if all("error" in problem for problem in result["problems"]):
        refused = {"device": device, "cases": counted["cases"], "wrong": f"{result['wrong']:,}"}
        return from_row(check, "arithmetic_refused", subject=device, evidence=lines, **refused)
    return from_row(check, wrong, subject=device, evidence=lines, wrong=f"{result['wrong']:,}", **counted)


def problem_lines(result: Mapping[str, Any]) -> list[str]:
    """The first problems, one line each, and how many more there are."""
    lines = [_line(problem) for problem in result["problems"][:_SHOWN]]
    left = result["wrong"] - len(lines)
    return [*lines, f"and {left:,} more results"] if left > 0 else lines


def _compared(result: Mapping[str, Any]) -> str:
    said = f"{result['elements']:,} elements of {result['cases']:,} results compared"
    return f"{said}, the largest error {100 * result['worst']:.0f} % of its bound" if result["worst"] else said


def _line(problem: Mapping[str, Any]) -> str:
    if "error" in problem:
        return f"{problem['case']}: refused with {problem['error']}"
    wrong, total = problem["wrong"], problem["of"]
    allowed = "it is exact" if problem["bound"] is None else f"it may differ by {problem['bound']:.3g}"
    shares = [
        f"{100 * problem[key] / wrong:.0f} % of them {words}"
        for key, words in (("zeros", "zero"), ("nans", "NaN"))
        if problem[key]
    ]
    where = f"the first at {problem['first']}{_region(problem)}"
    reads = [] if problem["reads_agree"] else ["read back again, it was different"]
    return (
        f"{problem['case']}: {wrong:,} of {total:,} elements wrong, {where}: {problem['found']} instead of "
        f"{problem['right']} ({allowed}){''.join(f'; {word}' for word in [*shares, *reads])}"
    )


def _region(problem: Mapping[str, Any]) -> str:
    """The smallest box that holds all wrong elements: a cut tile of a kernel is told by its sides."""
    sides = [end - begin for begin, end in problem["box"]]
    return f", all within {' x '.join(map(str, sides))}" if problem["wrong"] > 1 else ""
