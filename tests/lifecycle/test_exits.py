"""Endings: one line for each error that we raise, the right code, one voice for a group of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

from hf_rocm_tune import errors
from hf_rocm_tune.lifecycle import exits
from hf_rocm_tune.machine.process import check_bitsandbytes


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return


def raising(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


def group(*, rank: int = 0, restart: int = 0) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }


@pytest.mark.parametrize("kind", sorted(errors.TuneError.__subclasses__(), key=lambda kind: kind.__name__))
def test_each_error_of_ours_is_one_line_and_its_code(
    kind: type[errors.TuneError], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits.run_guarded(raising(kind("what is wrong,\n  got this, do that")), environ={}) == kind.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("hf-rocm-tune: ")
    assert "what is wrong, got this, do that" in printed.err


def test_a_bug_of_ours_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run_guarded(raising(ZeroDivisionError("ours")), environ={}) == 1
    assert "Traceback" in (printed := capsys.readouterr().err)
    assert "ZeroDivisionError: ours" in printed


def test_a_library_that_ends_the_process_when_it_is_imported_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bitsandbytes.py").write_text("import sys\nsys.exit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    with pytest.raises(errors.UsageError, match=r"installed but cannot be imported \(SystemExit: 1\)"):
        check_bitsandbytes()


def test_device_out_of_memory_is_known_by_type_and_advised(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    raised = torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1 GiB free.")
    assert exits.run_guarded(raising(raised), environ={}) == 5
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "HIP out of memory" in printed
    assert "--per_device_train_batch_size" in printed
    assert exits.run_guarded(raising(RuntimeError("out of memory")), environ={}) == 1


def test_a_group_prints_one_line_and_every_rank_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    failing = raising(errors.CorruptionError("bytes are wrong"))
    assert [exits.run_guarded(failing, environ=group(rank=rank)) for rank in (1, 0)] == [3, 3]
    assert capsys.readouterr().err == "hf-rocm-tune: [rank 1] error: bytes are wrong\n"


@pytest.mark.parametrize("broken", [RuntimeError("Connection closed by peer"), ValueError("ours")])
def test_only_a_broken_connection_is_a_consequence_of_a_peers_end(
    broken: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits.run_guarded(raising(broken), environ=group(rank=0)) == 1
    assert "Traceback" in capsys.readouterr().err, "nobody has said anything yet"
    exits.run_guarded(raising(errors.CorruptionError("bytes are wrong")), environ=group(rank=1))
    capsys.readouterr()
    ours = isinstance(broken, ValueError)
    assert exits.run_guarded(raising(broken), environ=group(rank=0)) == (1 if ours else 3)  # the peer's code
    assert ("Traceback" in capsys.readouterr().err) == ours


@pytest.mark.parametrize("kind", [errors.UsageError, errors.CorruptionError, errors.Interrupted])
def test_a_restart_after_a_final_ending_refuses_at_once(
    kind: type[errors.TuneError], capsys: pytest.CaptureFixture[str]
) -> None:
    exits.run_guarded(raising(kind("final")), environ=group(rank=1))
    assert "final" in capsys.readouterr().err
    ran: list[int] = []
    codes = [exits.run_guarded(lambda: ran.append(1) or 0, environ=group(rank=r, restart=2)) for r in (0, 1)]
    assert (codes, ran) == ([kind.exit_code] * 2, [])
    assert capsys.readouterr().err == "", "it has been said"


def test_a_restart_after_a_stall_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exits.run_guarded(raising(errors.StallError("stuck")), environ=group())
    assert exits.run_guarded(lambda: 0, environ=group(restart=1)) == 0
    assert exits.run_guarded(raising(errors.StallError("stuck again")), environ=group(restart=1)) == 4
    assert "stuck again" in capsys.readouterr().err


def test_a_record_of_another_launcher_does_not_silence_this_one(tmp_path: Path) -> None:
    """The key holds the parent: the same run id and rank under another launcher is another group."""
    code = (
        "import sys; from hf_rocm_tune import errors; from hf_rocm_tune.lifecycle import exits\n"
        "def main(): raise errors.UsageError('said')\n"
        "sys.exit(exits.run_guarded(main))\n"
    )
    through_a_shell = ["sh", "-c", f'{sys.executable} -c "$CODE"; exit $?']
    environ = os.environ | group() | {"TMPDIR": str(tmp_path), "CODE": code}
    for _ in range(2):
        done = subprocess.run(through_a_shell, env=environ, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (2, "hf-rocm-tune: error: said\n")


def test_ranks_without_an_agent_each_speak_and_their_next_job_is_not_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Started by mpirun or a shell, with the same port each time."""
    for number, wrong in enumerate(("first", "second")):
        environ = {"WORLD_SIZE": "2", "MASTER_PORT": "29500", "RANK": str(number)}
        assert exits.run_guarded(raising(errors.UsageError(wrong)), environ=environ) == 2
        assert wrong in capsys.readouterr().err
        assert exits.run_guarded(lambda: 0, environ=environ) == 0
    assert list(tmp_path.iterdir()) == []


def test_jobs_of_one_notebook_are_not_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel is the parent of all, and torch's agent names each job ``none``; only its log directory is new."""
    for job in ("none_ab12", "none_cd34"):
        environ = group() | {"TORCHELASTIC_ERROR_FILE": f"/tmp/torchelastic_x/{job}/attempt_0/0/error.json"}
        assert exits.run_guarded(raising(errors.UsageError("wrong")), environ=environ) == 2
        assert "wrong" in capsys.readouterr().err
        assert exits.run_guarded(lambda: 0, environ=environ | {"TORCHELASTIC_RESTART_COUNT": "1"}) == 2


def test_no_room_for_the_record_loses_neither_line_nor_code(tmp_path: Path) -> None:
    code = (
        "import resource; from hf_rocm_tune import errors; from hf_rocm_tune.lifecycle import exits\n"
        "def main():\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "    raise errors.CorruptionError('bytes')\n"
        "raise SystemExit(exits.run_guarded(main))\n"
    )
    environ = {**os.environ, **group(), "TMPDIR": str(tmp_path), exits.EXIT_FILE_VARIABLE: str(tmp_path / "exit")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "hf-rocm-tune: error: bytes\n")
    assert list(tmp_path.iterdir()) == []


def test_what_starts_and_ends_a_job_imports_no_torch() -> None:
    code = (
        "import sys, hf_rocm_tune.settings.start; from hf_rocm_tune.lifecycle import exits, launch, supervisor\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- restarts -------------------------------------------------------------------------------------------------------


def terminated() -> int:
    """What a rank does when SIGTERM reaches it."""
    with exits.sigterm_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not reached")


def test_sigterm_of_the_agent_says_nothing_and_keeps_no_restart_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's agent ends the ranks that are left so, before it starts all of them again."""
    environ = group() | {exits.EXIT_FILE_VARIABLE: str(tmp_path / "exit.json")}
    assert exits.run_guarded(terminated, environ=environ) == 143
    assert (capsys.readouterr().err, list(tmp_path.iterdir())) == ("", [])
    assert exits.run_guarded(lambda: 0, environ=environ | {"TORCHELASTIC_RESTART_COUNT": "1"}) == 0


def test_sigterm_of_an_agent_that_has_a_handler_of_its_own_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """As in processes of a notebook: the other rank was refused while this one was still importing."""

    def main() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        return 0

    before = signal.signal(signal.SIGTERM, _terminate_process_handler)
    try:
        assert exits.run_guarded(main) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == ""


def test_sigterm_that_the_launcher_was_sent_is_an_interruption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = group() | {exits.EXIT_FILE_VARIABLE: str(tmp_path / "exit.json")}
    (tmp_path / exits.ASKED_FILE).touch()
    assert exits.run_guarded(terminated, environ=environ) == 130
    assert "stopped by SIGTERM" in capsys.readouterr().err
    assert exits.run_guarded(lambda: 0, environ=environ | {"TORCHELASTIC_RESTART_COUNT": "1"}) == 130


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_whose_exception_python_drops_still_ends_the_run(number: int) -> None:
    thing = threading.Event()
    with exits.sigterm_as_interrupt():
        exits.interrupt_if_asked()
        kept = weakref.ref(thing, lambda _: signal.raise_signal(number))
        del thing
        assert kept() is None
        with pytest.raises(KeyboardInterrupt):
            exits.interrupt_if_asked()
