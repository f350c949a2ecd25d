"""PNG plots of results, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.bench.figures import show_bytes
from hf_rocm_tune.bench.result import Result
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def check_plot(path: Path | None) -> None:
    """Refuse a plot that cannot be drawn, before anything is measured.

    Raises:
        UsageError: the file is no PNG, or matplotlib cannot be imported.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: give a file whose name ends in .png")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib ({error}): `pip install matplotlib`") from error


def transfers(result: Result, path: Path) -> None:
    """GB/s over size, a panel for each direction, a line for each way; bars reach from minimum to maximum."""
    names = list(dict.fromkeys(row["direction"] for row in result.rows))
    figure, panels = _figure(result, len(names))
    for panel, name in zip(panels, names, strict=True):
        rows = [row for row in result.rows if row["direction"] == name]
        for way in dict.fromkeys(row["way"] for row in rows):
            mine = [row for row in rows if row["way"] == way]
            speeds = [row["gb_per_s"] for row in mine]
            panel.errorbar(
                [row["bytes"] for row in mine],
                [speed["median"] for speed in speeds],
                yerr=_reach(speeds),
                label=way,
                marker="o",
                capsize=3,
            )
        ticks = sorted({row["bytes"] for row in rows})
        panel.set(
            title=name, xlabel="bytes of one copy", ylabel="GB/s (10^9 bytes a second)", xscale="log", yscale="log"
        )
        panel.set_xticks(ticks, [show_bytes(tick) for tick in ticks], rotation=60)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path)


def loads(result: Result, path: Path) -> None:
    """Seconds to the first forward, and its part that is loading, by state of the page cache and side."""
    figure, (panel,) = _figure(result, 1)
    labels = [f"{row['side']}\n{row['cache']} cache" for row in result.rows]
    places = list(range(len(labels)))
    for figure_name, text, width in (
        ("seconds_to_forward", "to the end of the first forward", 0.7),
        ("seconds_load", "of these, loading", 0.4),
    ):
        values = [row[figure_name] for row in result.rows]
        panel.bar(places, [value["median"] for value in values], width, yerr=_reach(values), capsize=4, label=text)
    panel.set(ylabel="seconds")
    panel.set_xticks(places, labels)
    panel.legend()
    figure.savefig(path)


def _figure(result: Result, panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # not pyplot: it would look for a display

    figure = Figure(figsize=(7 * panels, 5.5), layout="constrained", dpi=120)
    figure.suptitle(f"{result.command}\n{result.machine['device']}", fontsize="small")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _reach(spreads: list[dict[str, Any]]) -> list[list[float]]:
    below = [spread["median"] - spread["min"] for spread in spreads]
    return [below, [spread["max"] - spread["median"] for spread in spreads]]
