"""A stall's report as a page for people: what the kernel says of each rank, and its Python stacks, as Python prints
them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def render(report: Mapping[str, Any]) -> str:
    """The page.

    Args:
        report: of a stall, see `watchdog.Stall`.
    """
    lines = [f"no progress for {report['silent_seconds']:.0f} s {report['where']}", report["cause"]]
    for rank in report["ranks"]:
        lines += ["", f"==== rank {rank['rank']}, pid {rank['pid']}, {rank['where']}", *_process(rank["process"])]
        lines += [f"child process {child['pid']}: {_seen(child)}" for child in rank["children"]]
        statement = rank["statement"]
        if statement is None:
            lines.append("it did not answer, so its Python stacks are not known")
        else:
            lines += _statement(statement)
    if report["ranks_on_other_machines"]:
        lines += ["", f"{report['ranks_on_other_machines']} ranks on other machines: nothing is known of them here"]
    return "\n".join(lines) + "\n"


def _process(process: Mapping[str, Any] | None) -> list[str]:
    if process is None:
        return ["there is no such process any more"]
    lines = [f"main thread: {_seen(process)}"]
    if process["syscall"]:
        lines.append(f"system call: {process['syscall']}")
    if process["kernel_stack"]:
        lines.append(f"kernel stack: {' < '.join(process['kernel_stack'])}")
    lines += [f"thread {each['name']}: {_seen(each)}" for each in process["threads"]]
    return lines


def _seen(task: Mapping[str, Any]) -> str:
    return f"state {task['state']}" + (f" in {task['waits_in']}" if task["waits_in"] else "")


def _statement(statement: Mapping[str, Any]) -> list[str]:
    lines = []
    for each in statement.get("collectives", {}).get("pending", ()):
        lines.append(f"open collective: {', '.join(f'{key} {value}' for key, value in each.items())}")
    for thread in statement["stacks"]:
        lines += ["", f"{thread['thread']} (most recent call last):"]
        for frame in thread["frames"]:
            lines.append(f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}')
            if frame["code"]:
                lines.append(f"    {frame['code']}")
    return lines
