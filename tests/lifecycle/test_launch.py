"""The launcher: the job's own code and line come through clean, real processes and real signals throughout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.lifecycle import launch, launcher_flags

#: A job that ends as its first argument says; with two processes, rank 1 ends so and rank 0 waits for it.
STUB = """
    import os, signal, sys, time
    from hf_rocm_tune import errors
    from hf_rocm_tune.lifecycle import exits

    KINDS = {2: errors.UsageError, 3: errors.CorruptionError, 5: errors.OutOfMemoryError}

    def main():
        how, rank = sys.argv[1], int(os.environ.get("RANK", "0"))
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and rank == 0:
            time.sleep(60)
        if how == "crash":
            raise ZeroDivisionError("a bug")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "bus":
            os.kill(os.getpid(), signal.SIGBUS)
        if how == "wait":
            caught = []
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda n, _: caught.append(n))
            os.write(1, b"ready\\n")
            while not caught:
                time.sleep(0.02)
            time.sleep(1.5)
            os.write(1, f"caught {' '.join(str(int(each)) for each in caught)}\\n".encode())  # in one piece
            time.sleep(1)  # torch's agent sends SIGTERM to the ranks that are left when the first has ended
            raise KeyboardInterrupt
        if int(how):
            raise KINDS[int(how)](f"ended on purpose with {how}: {os.environ.get('FROM_RECIPE', '-')}")
        return 0

    sys.exit(exits.run_guarded(main))
"""
#: Several launches in one process share the launcher's imports.
DRIVER = """
    import sys
    from hf_rocm_tune.lifecycle.exits import run_guarded
    from hf_rocm_tune.lifecycle.launch import launch

    for how in sys.argv[2:]:
        code = run_guarded(lambda: launch("stub_job", [how], accelerate_config=sys.argv[1], extra=[]))
        print("code", how, code, flush=True)
        print("----", file=sys.stderr, flush=True)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "stub_job.py").write_text(textwrap.dedent(STUB))
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{place}{os.pathsep}{os.environ['PYTHONPATH']}", "TMPDIR": str(place)}


def drive(place: Path, config: str, hows: Sequence[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Codes and stderr of several launches, by how each job ends."""
    done = subprocess.run(
        [sys.executable, str(place / "driver.py"), config, *hows],
        env=environment(place),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("code ")]
    codes = {how: int(code) for _, how, code in lines}
    return codes, dict(zip(hows, done.stderr.split("----\n"), strict=False))


def test_one_process_ends_as_the_job_ended(place: Path) -> None:
    codes, errors = drive(place, "cpu", ["0", "3", "crash", "kill", "bus"])
    assert codes == {"0": 0, "3": 3, "crash": 1, "kill": 137, "bus": 135}
    assert "SIGBUS" in errors["bus"] and "a file that is mapped is cut off" in errors["bus"]
    assert errors["0"] == ""
    assert errors["3"] == "hf-rocm-tune: error: ended on purpose with 3: -\n"
    assert errors["crash"].count("Traceback") == 1, "the job's own, and none of the launcher"
    assert "ZeroDivisionError: a bug" in errors["crash"]
    assert errors["crash"].endswith(
        "hf-rocm-tune: error: the training process ended with exit code 1; its own message is above\n"
    )
    assert errors["kill"].count("\n") == 1
    assert "SIGKILL" in errors["kill"]


def test_a_model_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    for name, size in (("whole", 16), ("short", 16)):
        save_file({"a": torch.zeros(size)}, tmp_path / f"{name}.safetensors")
    os.truncate(tmp_path / "short.safetensors", (tmp_path / "short.safetensors").stat().st_size - 4)
    (tmp_path / "other.safetensors").write_bytes(b"x" * 5)
    found = launch._cut_off(["--model_name_or_path", str(tmp_path), "--seed=3", f"--output_dir={tmp_path / 'none'}"])
    assert found == [f"{tmp_path / 'short.safetensors'} is cut off"]


def test_two_processes_end_as_one_of_them_ended(place: Path) -> None:
    codes, errors = drive(place, "cpu_dual", ["3", "kill"])
    assert codes == {"3": 3, "kill": 137}
    assert errors["3"] == "hf-rocm-tune: [rank 1] error: ended on purpose with 3: -\n"
    assert errors["kill"].count("\n") == 1
    assert "SIGKILL" in errors["kill"]


def launched(place: Path, how: str, config: str, *flags: str, **environ: str) -> subprocess.Popen[str]:
    """One launch in a process of its own."""
    code = "import sys; from hf_rocm_tune.lifecycle import exits, launch\n" + (
        f"sys.exit(exits.run_guarded(lambda: launch.launch('stub_job', [{how!r}], "
        "accelerate_config=sys.argv[1], extra=sys.argv[2:])))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, config, *flags], env=environment(place) | environ, cwd=place,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_how_the_last_attempt_ended_is_told(place: Path) -> None:
    """Whatever an earlier attempt has recorded, also if rank 0 has not begun when rank 1 ends the last one."""
    stub = (place / "stub_job.py").read_text()
    count = "os.environ.get('TORCHELASTIC_RESTART_COUNT')"
    stub = stub.replace(
        'if how == "crash":', f"if {count} == '0': raise errors.StallError('stuck')\n    if how == 'crash':"
    )
    slow = f"if {count} == '1' and os.environ['RANK'] == '0': time.sleep(60)\n"
    (place / "stub_job.py").write_text(stub.replace("sys.exit(", f"{slow}sys.exit("))
    job = launched(place, "kill", "cpu_dual", "--max_restarts", "1")
    err = job.communicate(timeout=120)[1]
    assert job.returncode == 137 and "was ended by SIGKILL" in err.splitlines()[-1], err


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
@pytest.mark.parametrize("config", [pytest.param("cpu", marks=pytest.mark.long), "cpu_dual"])
def test_a_signal_reaches_the_job_once(place: Path, config: str, number: signal.Signals) -> None:
    if config == "cpu_dual":  # every rank waits: rank 0 has to be a waiting one as well
        stub = (place / "stub_job.py").read_text().replace("rank == 0:\n        time.sleep(60)", "False:\n        pass")
        (place / "stub_job.py").write_text(stub)
    # The job takes 1.5 s to end: torch's agent would kill its workers before, if the signal were its own affair.
    impatient = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1", "HF_ROCM_TUNE_EXIT_FILE": str(place / "exit.json")}
    job = launched(place, "wait", config, **impatient)
    ranks = 2 if config == "cpu_dual" else 1
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(ranks)] == ["ready\n"] * ranks
    time.sleep(0.1)
    os.kill(job.pid, number)
    out, err = job.communicate(timeout=60)
    assert out == f"caught {int(number)}\n" * ranks
    assert job.returncode == 130
    assert err.splitlines()[-1].endswith("interrupted: stopped by Ctrl-C")
    assert err.count("\n") == 1
    told = json.loads((place / "exit.json").read_text())
    assert told == {"code": 130, "message": "stopped by Ctrl-C"}, "who asked the launcher is told what the job told it"


def test_accelerate_launch_as_given_ends_as_the_job_ended(place: Path) -> None:
    """A configuration of the user's own, in the launcher's own words."""
    (place / "mine.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n")
    module = "hf_rocm_tune.lifecycle.launch"
    command = [sys.executable, "-m", module, "--quiet", "--config_file", "mine.yaml", "-m", "stub_job"]
    done = subprocess.run(
        [*command, "5"], env=environment(place), cwd=place, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (5, "hf-rocm-tune: error: ended on purpose with 5: -\n")


def test_flags_are_told_apart() -> None:
    ours = ["--num-processes", "2", "--multi_gpu", "--main_process_port=0"]
    jobs = ["--lora_r", "8", "--packing", "--debug", "underflow_overflow", "--gradient_accumulation_steps", "4"]
    line = launch.split([*ours[:2], *jobs[:2], "--accelerate_config=cpu_dual", *ours[2:], *jobs[2:], "-m", "--module"])
    assert line.accelerate_config == "cpu_dual"
    assert line.launcher == ours
    assert line.job == [*jobs, "-m", "--module"]


def test_the_flags_that_both_have_are_the_known_ones() -> None:
    """Which flags the launcher may take is decided without TRL (its import costs seconds): this keeps that true."""
    from accelerate.commands.launch import launch_command_parser
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

    from hf_rocm_tune.settings.arguments import RanksArguments, TuneArguments

    owners = (TuneArguments, RanksArguments, ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)
    job = {field.name for owner in owners for field in fields(owner) if field.init}
    assert not job & {*launcher_flags.launcher_flags()}
    everything = {action.dest for action in launch_command_parser()._actions}
    assert everything & job == launcher_flags.SHARED_WITH_THE_JOB


@pytest.mark.parametrize(
    ("config", "extra", "named"),
    [
        ("cpu_dul", [], ["cpu_dul", "cpu_dual"]),
        ("no/such/file.yaml", [], ["file.yaml"]),
        ("cpu", ["--num_processes", "2"], ["--num_processes 2", "cpu_dual"]),
        ("cpu", ["--num_processes", "two"], ["num_processes", "two"]),
        ("cpu_dual", ["--num_processes", "1", "--multi_gpu"], ["2 processes"]),
        ("cpu_dual", ["--cpu", "--multi_gpu"], ["--cpu"]),
    ],
)
def test_wrong_launcher_flags_are_one_message(config: str, extra: list[str], named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        launch.launch("stub_job", [], accelerate_config=config, extra=extra)
    assert all(name in str(caught.value) for name in named), caught.value


def test_the_configuration_follows_the_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = []
    for gpu in (False, True):
        monkeypatch.setattr(launch.process, "has_accelerator", lambda gpu=gpu: gpu)
        chosen += [Path(launch._config_flags(None, extra)[1]).stem for extra in ([], ["--num_processes", "2"])]
    assert chosen == ["cpu", "cpu_dual", "single_rx7900xt", "dual_rx7900xt"]
    assert Path(launch._config_flags(None, ["--num_machines", "2"])[1]).stem == "multi_node"
    assert "accelerate config cpu_dual (no GPU is visible" in capsys.readouterr().out
    assert launch._config_flags(None, ["--config_file", "mine.yaml"]) == []
