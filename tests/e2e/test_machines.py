"""Several machines, and restarts: the job goes on by itself and ends with the adapter of an undisturbed run, bit for
bit; what cannot be mended by a restart ends it on every machine, with the cause in one line.

The machines are launchers on this one, see `several_machines`. Not covered: a real network, and cards. All of it is
`long`; a sample in which the jobs import no training library is `tests/test_launch_machines.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_rocm_tune.integrity import manifest
from tests import tiny
from tests.e2e.command import TIMEOUT
from tests.e2e.conftest import flags, losses_of, report_of
from tests.e2e.several_machines import Machines, loopback, namespaces

STEPS = 9
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def settings(model_of: Callable[[str], Path], scratch: Path) -> list[str]:
    """Flags of all runs but the output directory; with dropout, so that the random state counts."""
    return flags(
        model_name_or_path=model_of("llama3"),
        dataset_name=tiny.write_dataset_dir(scratch / "machines-data", train=24, test=4),
        num_train_epochs=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_length=64,
        learning_rate=0.01,
        lora_dropout=0.2,
        logging_steps=1,
        save_steps=2,
        disable_tqdm=True,
    )


@pytest.fixture(scope="module")
def whole(settings: list[str], scratch: Path) -> Path:
    """Output of the undisturbed run: two processes on one machine."""
    output = scratch / "machines-whole"
    run_here(settings, output)
    return output


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Two machines on loopback."""
    with loopback(tmp_path) as made:
        yield made


def run_here(settings: list[str], output: Path, *more: str, **environ: str) -> str:
    """Two processes under one launcher, to a good end. Returns what they printed."""
    command = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", "cpu_dual", *settings]
    done = subprocess.run(
        [*command, "--output_dir", str(output), *more],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_same_result(whole: Path, output: Path) -> None:
    """The way and its end, bit for bit."""
    assert (output / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    assert losses_of(output) == losses_of(whole)
    assert len(losses_of(output)) == STEPS
    found = manifest.inspect(output)
    assert found.manifest is not None and found.manifest.status == "final" and found.problems == []
    report = report_of(output)
    assert report["ranks"] == 2
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0


def checkpointed(output: Path, step: int) -> None:
    """Waits for a checkpoint."""
    deadline = time.monotonic() + TIMEOUT
    while not (output / f"checkpoint-{step}" / manifest.MANIFEST_NAME).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_a_rank_killed_on_the_second_machine_is_started_again(
    settings: list[str], whole: Path, machines: Machines, tmp_path: Path
) -> None:
    """With ``--overwrite_output_dir``, which a restart must not honour again, whoever counts the restarts."""
    argv = [*settings, "--output_dir", str(tmp_path / "out"), "--max_restarts", "1", "--overwrite_output_dir"]
    crash = {"HF_ROCM_TUNE_CRASH": "kind=kill,step=6,rank=1"}
    started = [machines.start(number, *argv, environ=crash) for number in (0, 1)]
    ended = [each.wait(2 * TIMEOUT) for each in started]
    assert [each.code for each in ended] == [0, 0], [each.stderr[-2000:] for each in ended]
    assert sum(each.stdout.count("has started all processes again") for each in ended) == 1
    assert sum(each.stdout.count("the run goes on from checkpoint-4") for each in ended) == 1
    assert_same_result(whole, tmp_path / "out")


@pytest.mark.long
def test_wrong_input_on_one_machine_ends_the_job_on_both(
    settings: list[str], machines: Machines, tmp_path: Path
) -> None:
    """The other would wait for it as long as the process group may take, and try again."""
    argv = [*settings, "--output_dir", str(tmp_path / "out"), "--max_restarts", "2"]
    started = [machines.start(0, *argv), machines.start(1, *argv, "--learning_rat", "3")]
    ended = [each.wait(TIMEOUT) for each in started]
    assert [each.code for each in ended] == [2, 2]
    for each in ended:
        said = [line for line in each.stderr.splitlines() if line.startswith("hf-rocm-tune:")]
        assert len(said) == 1 and "unknown flag --learning_rat" in said[0], each.stderr[-2000:]
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_rank_killed_on_one_machine_is_started_again(settings: list[str], whole: Path, tmp_path: Path) -> None:
    printed = run_here(settings, tmp_path / "out", "--max_restarts", "1", HF_ROCM_TUNE_CRASH="kind=kill,step=6,rank=1")
    assert "the run goes on from checkpoint-4" in printed
    assert_same_result(whole, tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_machine_that_is_cut_off_comes_back(
    settings: list[str], whole: Path, machines: Machines, tmp_path: Path, number: int
) -> None:
    """Machine 1 is admitted again. With machine 0 the place to meet is gone, so both are started again."""
    output = tmp_path / "out"
    argv = [*settings, "--output_dir", str(output), "--max_restarts", "2"]
    started = {each: machines.start(each, *argv) for each in (0, 1)}
    checkpointed(output, 4)
    started[number].cut_off()
    again = [number]
    if number == 0:
        left = started[1].wait(TIMEOUT)
        assert left.code == 4 and "machine 0 does not answer at 127.0.0.1:" in left.stderr, left.stderr[-2000:]
        again = [0, 1]
    started |= {each: machines.start(each, *argv) for each in again}
    ended = [started[each].wait(2 * TIMEOUT) for each in (0, 1)]
    assert [each.code for each in ended] == [0, 0], [each.stderr[-2000:] for each in ended]
    assert_same_result(whole, output)


@pytest.mark.long
def test_corruption_on_one_machine_is_final_on_both(settings: list[str], machines: Machines, tmp_path: Path) -> None:
    fault = {"HF_ROCM_TUNE_FAULT": "kind=zero,stage=batches,persist=1"}
    argv = [*settings, "--output_dir", str(tmp_path / "out"), "--max_restarts", "3"]
    started = [machines.start(0, *argv), machines.start(1, *argv, environ=fault)]
    ended = [each.wait(TIMEOUT) for each in started]
    assert [each.code for each in ended] == [3, 3], [each.stderr[-2000:] for each in ended]
    assert sum("ended the job: " in each.stderr for each in ended) == 1


@pytest.mark.long
def test_a_setting_that_differs_is_named_before_the_model_is_loaded(
    settings: list[str], machines: Machines, tmp_path: Path
) -> None:
    argv = [*settings, "--output_dir", str(tmp_path / "out")]
    started = [machines.start(0, *argv), machines.start(1, *argv, "--weight_decay", "0.5")]
    ended = [each.wait(TIMEOUT) for each in started]
    assert [each.code for each in ended] == [2, 2]
    assert any("--weight_decay 0.5" in each.stderr and "same command" in each.stderr for each in ended)
    assert all("Loading weights" not in each.stderr for each in ended)


@pytest.mark.long
def test_supervisors_on_both_machines_bring_them_together_again(
    settings: list[str], whole: Path, machines: Machines, tmp_path: Path
) -> None:
    """`hf-rocm-tune run --` on each, without ``--max_restarts``: every start is a new launch of both."""
    output = tmp_path / "out"
    watched = [sys.executable, "-m", "hf_rocm_tune", "run", "--backoff_seconds", "1", "--"]
    crash = {"HF_ROCM_TUNE_CRASH": "kind=kill,step=6,rank=1"}
    argv = [*settings, "--output_dir", str(output)]
    started = [machines.start(number, *argv, before=watched, environ=crash) for number in (0, 1)]
    ended = [each.wait(3 * TIMEOUT) for each in started]
    assert [each.code for each in ended] == [0, 0], [each.stdout[-2000:] + each.stderr[-2000:] for each in ended]
    assert_same_result(whole, output)
    # With one address for both, rank 0 may change machines from start to start: each start is in the journal once.
    assert report_of(output)["survival"]["starts"] == 2


@pytest.mark.long
def test_machines_with_networks_of_their_own(settings: list[str], whole: Path, tmp_path: Path) -> None:
    """Neither reaches the other by a loopback address, which is what the host's name gives; and a rank is killed."""
    with namespaces(tmp_path) as machines:
        if machines is None:
            pytest.skip("network namespaces are not permitted here")
        argv = [*settings, "--output_dir", str(tmp_path / "out"), "--max_restarts", "1"]
        crash = {"HF_ROCM_TUNE_CRASH": "kind=kill,step=6,rank=1"}
        started = [machines.start(number, *argv, environ=crash) for number in (0, 1)]
        ended = [each.wait(2 * TIMEOUT) for each in started]
    assert [each.code for each in ended] == [0, 0], [each.stderr[-2000:] for each in ended]
    assert_same_result(whole, tmp_path / "out")


@pytest.mark.long
def test_an_output_directory_that_is_not_shared_is_refused(settings: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    hidden = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{output}" && exec "$@"', "sh"]
    with namespaces(tmp_path) as machines:
        if machines is None or subprocess.run([*hidden, "true"], check=False, capture_output=True).returncode:
            pytest.skip("namespaces are not permitted here")
        argv = [*settings, "--output_dir", str(output)]
        started = [machines.start(0, *argv), machines.start(1, *argv, inside=hidden)]
        ended = [each.wait(TIMEOUT) for each in started]
    assert [each.code for each in ended] == [2, 2], [each.stderr[-2000:] for each in ended]
    assert any("put it on a disk that all machines share" in each.stderr for each in ended)
    assert sorted(path.name for path in output.iterdir()) == ["_run.lock"]
