"""The drill's results as text."""

from __future__ import annotations

from hf_rocm_tune.doctor.drill import Drill
from hf_rocm_tune.doctor.injected import Tally

_COLUMNS = ("injected", "detected", "recovered", "stopped", "missed", "false alarms")
_SKIPPED = "skipped, --full runs them"


def table(drill: Drill) -> str:
    """The table of faults, and a line each for clean transfers, cost, casts, canaries and the verdict."""
    lines = [f"drill on {drill.device}, seed {drill.settings.seed}, {drill.seconds:.0f} s", ""]
    lines.append(f"{'fault':<11} {'hits':<6} " + " ".join(f"{column:>{max(len(column), 9)}}" for column in _COLUMNS))
    for (kind, persist), tally in drill.injected.tallies.items():
        lines.append(_row(kind, "always" if persist else "once", tally))
    lines += [_row("all", "", drill.injected.total()), ""]
    sizes = drill.injected.sizes
    lines.append(
        f"spread over  {len(drill.injected.stages)} stages, {len(drill.injected.dtypes)} dtypes, "
        f"{min(sizes, default=0):,} to {max(sizes, default=0):,} bytes; 'after' harms memory after the verdict, and is "
        "found by digesting it again"
    )
    clean = drill.clean
    lines.append(
        f"clean        {clean.transfers:,} transfers: {clean.false_alarms} false alarms, {clean.corrupted} corrupted, "
        f"{clean.missed} missed"
    )
    for row in drill.cost:
        lines.append(
            f"cost         {row.what}, nothing overlapped: {row.verified_mb_per_s:,.0f} MB/s verified, "
            f"{row.unverified_mb_per_s:,.0f} MB/s not"
        )
    lines += [f"casts        {_casts(drill)}", f"canaries     {_canaries(drill)}"]
    failures = drill.failures()
    lines.append(f"verdict      {'; '.join(failures) if failures else 'every fault was found, and nothing else'}")
    return "\n".join(lines)


def _row(kind: str, hits: str, tally: Tally) -> str:
    counts = [f"{getattr(tally, column.replace(' ', '_')):>{max(len(column), 9)},}" for column in _COLUMNS]
    if kind == "after":
        counts[2:4] = [f"{'-':>9}"] * 2  # what happens next is the sentinels' matter
    return f"{kind:<11} {hits:<6} " + " ".join(counts)


def _casts(drill: Drill) -> str:
    casts = drill.casts
    if casts is None:
        return _SKIPPED
    return f"{casts.elements:,} elements in {casts.compared} casts against the CPU's: {casts.wrong:,} differ"


def _canaries(drill: Drill) -> str:
    watched = drill.canaries
    if watched is None:
        return _SKIPPED
    settings = watched.settings
    sizes = (
        f"{settings.canaries} of {settings.canary_bytes >> 20} MiB beside up to {settings.churn_bytes >> 20:,} MiB "
        f"that come and go, {settings.cycles} cycles"
    )
    rehearsal = "the one harmed on purpose was found" if watched.rehearsed else "the one harmed on purpose was MISSED"
    return f"{sizes}: {'held' if watched.fault is None else 'one changed'}; {rehearsal}"
