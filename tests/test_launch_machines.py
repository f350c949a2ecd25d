"""Two launchers on loopback, as on two machines: what ends the job for good ends it on both, what does not is tried
again, and each launcher ends with the job's own code and one line. The jobs import no training library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.two_ranks import free_port

#: Each machine's job has a word of its own; every try of it leaves a file.
STUB = """
    import os, signal, sys, time
    from hf_rocm_tune import errors, exits

    @exits.sigterm_as_interrupt()
    def main():
        how, place = sys.argv[1], sys.argv[2]
        number = len([name for name in os.listdir(place) if name.startswith(how)])
        open(f"{place}/{how}-{number}", "w").close()
        if how == "wrong":
            raise errors.UsageError("wrong on purpose")
        if how == "corrupt":
            raise errors.CorruptionError("corrupt on purpose")
        if how == "dies" and number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "waits" and not exits.is_restart(os.environ):
            exits._SECONDS_TO_END = 1.0
            exits.listen_to_other_machines(os.environ)
            open(f"{place}/ready-{os.environ['GROUP_RANK']}", "w").close()
            time.sleep(600)
        return 0

    sys.exit(exits.run_guarded(main))
"""
DRIVER = """
    import sys
    from hf_rocm_tune import exits, launch

    number, port, how, place, *extra = sys.argv[1:]
    meeting = ["--machine_rank", number, "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    job = ["stub_job", [how, place]]
    sys.exit(exits.run_guarded(lambda: launch.launch(*job, accelerate_config="multi_node", extra=[*meeting, *extra])))
"""


class Two:
    """Two launchers and what becomes of them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name, text in (("stub_job.py", STUB), ("driver.py", DRIVER)):
            (place / name).write_text(textwrap.dedent(text))
        self._port = free_port()
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *hows: str, max_restarts: int = 2) -> None:
        """The launchers of machine 0 and 1, with the job of each."""
        for number, how in enumerate(hows):
            own = self.place / f"tmp-{number}"
            own.mkdir()
            path = f"{self.place}{os.pathsep}{os.environ['PYTHONPATH']}"
            words = [str(number), str(self._port), how, str(self.place), "--max_restarts", str(max_restarts)]
            self.running.append(
                subprocess.Popen(
                    [sys.executable, str(self.place / "driver.py"), *words],
                    env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(own)},
                    cwd=self.place,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def ready(self, *numbers: int) -> None:
        """Waits until the jobs of these machines wait."""
        deadline = time.monotonic() + 120
        while not all((self.place / f"ready-{number}").exists() for number in numbers):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self, number: int) -> tuple[int, list[str]]:
        """Code and lines of one launcher; what its job says is among them."""
        _, err = self.running[number].communicate(timeout=180)
        return self.running[number].returncode, [line for line in err.splitlines() if line.startswith("hf-rocm-tune")]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    """Nothing of it lives on."""
    import psutil

    made = Two(tmp_path)
    yield made
    for each in made.running:
        if each.poll() is None:
            for process in [*psutil.Process(each.pid).children(recursive=True), each]:
                process.kill()
        each.communicate(timeout=60)


@pytest.mark.parametrize(("how", "code"), [("wrong", 2), pytest.param("corrupt", 3, marks=pytest.mark.long)])
def test_an_ending_for_good_on_one_machine_is_that_of_both(two: Two, how: str, code: int) -> None:
    two.start("waits", how)
    (first, said), (second, cause) = two.end(0), two.end(1)
    assert (first, second) == (code, code)
    assert cause == [f"hf-rocm-tune: [rank 1] error: {how} on purpose"]
    assert said == [f"hf-rocm-tune: error: rank 1 on {os.uname().nodename} ended the job: {how} on purpose"]
    assert len(list(two.place.glob(f"{how}-*"))) == len(list(two.place.glob("waits-*"))) == 1, "nothing was tried again"


@pytest.mark.long
def test_a_process_that_is_killed_is_started_again_on_both(two: Two) -> None:
    """The healthy one is ended by its own agent, which must not count as a wish of the user's."""
    two.start("waits", "dies", max_restarts=1)
    assert (two.end(0), two.end(1)) == ((0, []), (0, []))
    assert len(list(two.place.glob("dies-*"))) == len(list(two.place.glob("waits-*"))) == 2


@pytest.mark.long
def test_a_signal_to_one_launcher_ends_both(two: Two) -> None:
    two.start("waits", "waits")
    two.ready(0, 1)
    two.running[1].send_signal(signal.SIGTERM)
    (first, said), (second, own) = two.end(0), two.end(1)
    assert (first, second) == (130, 130)
    assert own == ["hf-rocm-tune: [rank 1] interrupted: stopped by SIGTERM"]
    assert len(said) == 1 and "ended the job: stopped by SIGTERM" in said[0]


@pytest.mark.long
def test_without_machine_0_there_is_no_place_to_meet(two: Two) -> None:
    import psutil

    two.start("waits", "waits")
    two.ready(0, 1)
    for process in [*psutil.Process(two.running[0].pid).children(recursive=True), two.running[0]]:
        process.kill()
    code, said = two.end(1)
    assert code == 4 and len(said) == 1 and "machine 0 does not answer at 127.0.0.1:" in said[0]
