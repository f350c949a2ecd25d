"""Machines that are launchers on this one: each with a machine rank, a temporary directory and a home of its own.

`loopback` has them meet on 127.0.0.1. `namespaces` gives each a network stack of its own, joined by a virtual cable, so
that neither reaches the other by a loopback address; it needs root.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.command import Result
from tests.two_ranks import free_port


@dataclass(kw_only=True)
class Started:
    """The launcher of one machine."""

    process: subprocess.Popen[str]
    files: tuple[Path, Path]

    def wait(self, timeout: float) -> Result:
        """Its end."""
        code = self.process.wait(timeout)
        return Result(code=code, stdout=self.files[0].read_text(), stderr=self.files[1].read_text())

    def cut_off(self) -> None:
        """SIGKILL to the launcher and all that it has started, as when the power is switched off."""
        everything = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for each in everything:
            each.send_signal(signal.SIGKILL)
        self.process.wait(30)


@dataclass(kw_only=True)
class Machines:
    """Two machines.

    Args:
        root: a directory for what they print and for their own files.
        address: of machine 0.
        within: for each machine, the command in which its processes are started.
    """

    root: Path
    address: str = "127.0.0.1"
    within: tuple[Sequence[str], Sequence[str]] = ((), ())
    port: int = field(default_factory=free_port)
    started: list[Started] = field(default_factory=list)

    def start(
        self,
        number: int,
        *flags: str,
        before: Sequence[str] = (),
        inside: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Started:
        """Starts the launcher of a machine.

        Args:
            number: its machine rank.
            flags: of `hf-rocm-tune sft`, beside those of the machine.
            before: words in front of the command, such as those of the supervisor.
            inside: a command in which all of it runs.
            environ: further variables.
        """
        own = self.root / f"machine-{number}"
        for name in ("home", "tmp"):
            (own / name).mkdir(parents=True, exist_ok=True)
        files = (own / f"out-{len(self.started)}", own / f"err-{len(self.started)}")
        program = [sys.executable, "-m", "hf_rocm_tune"]
        meeting = ["--main_process_ip", self.address, "--main_process_port", str(self.port)]
        command = [*program, "sft", "--accelerate_config", "multi_node", "--machine_rank", str(number), *meeting]
        with files[0].open("w") as out, files[1].open("w") as err:
            process = subprocess.Popen(
                [*self.within[number], *inside, *before, *command, *flags],
                stdout=out,
                stderr=err,
                text=True,
                env={**os.environ, "HOME": str(own / "home"), "TMPDIR": str(own / "tmp"), **(environ or {})},
            )
        self.started.append(Started(process=process, files=files))
        return self.started[-1]

    def end(self) -> None:
        """Nothing of a test may live on."""
        for each in self.started:
            if each.process.poll() is None:
                each.cut_off()


@contextmanager
def loopback(root: Path) -> Iterator[Machines]:
    """Two machines on 127.0.0.1."""
    machines = Machines(root=root)
    try:
        yield machines
    finally:
        machines.end()


@contextmanager
def namespaces(root: Path) -> Iterator[Machines | None]:
    """Two machines with networks of their own; None where that is not permitted."""
    names = [f"hfrt{os.getpid()}{letter}" for letter in "ab"]
    made = [name for name in names if _ip("netns", "add", name)]
    machines = None
    try:
        if len(made) == 2 and _ip(
            "link", "add", "v0", "netns", names[0], "type", "veth", "peer", "v0", "netns", names[1]
        ):
            for number, name in enumerate(names):
                _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "v0")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", "v0", "up")
            within = tuple(["ip", "netns", "exec", name] for name in names)
            machines = Machines(root=root, address="10.77.0.1", within=(within[0], within[1]))
        yield machines
    finally:
        if machines is not None:
            machines.end()
        for name in made:
            _ip("netns", "del", name)


def _ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False, timeout=30).returncode == 0
    except FileNotFoundError:
        return False
