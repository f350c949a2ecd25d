"""Runs `python -m hf_rocm_tune.sft` commands as real processes, through the zygote."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT = 240.0  # seconds; a run of a tiny model takes a few


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished command left.

    Args:
        code: exit code, or minus the signal's number.
        stdout: all that it printed.
        stderr: likewise.
    """

    code: int
    stdout: str
    stderr: str

    @property
    def error_lines(self) -> list[str]:
        """Lines of standard error that our boundary printed."""
        return [line for line in self.stderr.splitlines() if line.startswith("hf-rocm-tune: error:")]


def error_lines(texts: Iterable[str]) -> list[str]:
    """The lines that our boundary printed, in the standard error of all ranks of a job; there is no traceback."""
    said = [line for text in texts for line in text.splitlines()]
    assert not any("Traceback" in line for line in said), said
    return [line for line in said if re.match(r"hf-rocm-tune: (\[rank \d+\] )?error: ", line)]


def log_rows(text: str) -> list[dict[str, str]]:
    """The rows of the training log that a run has printed, by the titles of their columns."""
    titles: list[str] = []
    rows = []
    for line in text.splitlines():
        cells = re.split(r" {2,}", line.strip())
        if cells[0] == "step":
            titles = cells
        elif titles and len(cells) == len(titles):
            rows.append(dict(zip(titles, cells, strict=True)))
    return rows


class Running:
    """A command that has been started."""

    def __init__(self, server: CommandServer, pid: int, files: tuple[Path, Path]) -> None:
        self.pid = pid
        self._server = server
        self._files = files

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the command's process group."""
        os.killpg(self.pid, number)

    def until(self, happened: Callable[[], bool], *, timeout: float = 60.0) -> bool:
        """Watches closely until something happened; False if the command ended before."""
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.001)
            if self._has_ended():
                return False
        return True

    def after_step(self, step: int) -> bool:
        """Watches until the log has the row of a step; False if the command ended before."""
        return self.until(lambda: len(log_rows(self.printed())) >= step)

    def _has_ended(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    def printed(self) -> str:
        """What it has written to standard output so far."""
        return self._files[0].read_text(errors="replace") if self._files[0].is_file() else ""

    def said(self) -> str:
        """What it has written to standard error so far."""
        return self._files[1].read_text(errors="replace") if self._files[1].is_file() else ""

    def poll(self, timeout: float = 0.01) -> Result | None:
        """The result if the command ends within the time."""
        status = self._server.ask({"do": "wait", "pid": self.pid, "timeout": timeout})["status"]
        if status is None:
            return None
        code = os.waitstatus_to_exitcode(status)
        return Result(code=code, stdout=self.printed(), stderr=self.said())

    def wait(self, timeout: float = TIMEOUT) -> Result:
        """The result; a command that does not end in time is killed and fails the test."""
        result = self.poll(timeout)
        if result is None:
            self.kill()
            self.poll(10)
            raise AssertionError(f"the command did not end within {timeout} s: {self._files[1].read_text()[-2000:]}")
        return result


class CommandServer:
    """Owns the zygote.

    Args:
        scratch: directory for the commands' output and caches.
        env: variables of all commands that must be there before anything is imported.
        command: makes a command line of Python's arguments; by default that of this Python.
    """

    def __init__(
        self,
        scratch: Path,
        env: dict[str, str] | None = None,
        command: Callable[[list[str]], list[str]] = lambda argv: [sys.executable, *argv],
    ) -> None:
        self._scratch = scratch
        self._count = 0
        scratch.mkdir(parents=True, exist_ok=True)
        environment = {
            # Not what a test of this process has set for Accelerate: it would take the commands' card away.
            **{name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")},
            "HF_HOME": str(scratch / "hf"),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
            **(env or {}),
        }
        self._process = subprocess.Popen(
            command(["-m", "tests.e2e.zygote"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        self._read()

    def start(
        self, *argv: str, env: dict[str, str] | None = None, cwd: Path | None = None, out: str = "", err: str = ""
    ) -> Running:
        """Starts `python -m hf_rocm_tune.sft ARGV` and returns; ``out`` and ``err`` may be a pipe or a terminal."""
        self._count += 1
        files = (
            Path(out or self._scratch / f"{self._count}.out"),
            Path(err or self._scratch / f"{self._count}.err"),
        )
        request = {
            "do": "start",
            "argv": list(argv),
            "env": env or {},
            "cwd": str(cwd or self._scratch),
            "stdout": str(files[0]),
            "stderr": str(files[1]),
        }
        return Running(self, self.ask(request)["pid"], files)

    def run(self, *argv: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Result:
        """Runs a command to its end."""
        return self.start(*argv, env=env, cwd=cwd).wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, one answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the zygote."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the zygote died with code {self._process.wait(5)}")
        answer: dict[str, Any] = json.loads(line)
        return answer
