"""What the package exports trains under Accelerate's `notebook_launcher`, started as on ROCm: by spawn.

On a CPU the launcher would fork; it is told that this is ROCm, which changes nothing else in it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_rocm_tune import notebook
from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.e2e.command import log_rows
from tests.e2e.conftest import flags, report_of

LAUNCH = """
import json, socket, sys
import hf_rocm_tune
from accelerate import launchers, notebook_launcher
from hf_rocm_tune import notebook
if __name__ == "__main__":
    launchers.is_rocm_available = lambda: True
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    notebook_launcher(notebook.train, args=(json.loads(sys.argv[1]),), num_processes=2, use_port=str(port))
"""


def job(tmp_path: Path, **more: int) -> list[str]:
    """The flags of a small job."""
    model = tiny.build("llama3", tmp_path / "models")
    data = tiny.write_dataset_dir(tmp_path / "data", train=16, test=4)
    settings = {"per_device_train_batch_size": 2, "max_length": 64, "disable_tqdm": True, **more}
    return flags(model_name_or_path=model, dataset_name=data, output_dir=tmp_path / "out", **settings)


def launch(tmp_path: Path, argv: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the launcher in a process of its own, as a notebook's kernel would."""
    script = tmp_path / "launch.py"
    script.write_text(LAUNCH)
    command = [sys.executable, str(script), json.dumps(argv)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env)


def test_what_is_launched_can_be_pickled_and_found_again() -> None:
    assert pickle.loads(pickle.dumps(notebook.train)) is notebook.train


def test_a_job_that_fails_raises_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(notebook.TrainingFailed) as caught:
        notebook.train(["--config", "no-such-recipe"])
    assert caught.value.exit_code == 2 and "exit code 2" in str(caught.value)
    assert "no-such-recipe" in capsys.readouterr().err
    sent = pickle.loads(pickle.dumps(caught.value))  # from a spawned process to the notebook's
    assert (type(sent), sent.exit_code, str(sent)) == (notebook.TrainingFailed, 2, str(caught.value))


@pytest.mark.long
def test_two_spawned_processes_train_verified_and_catch_a_wrong_average(tmp_path: Path) -> None:
    argv = job(tmp_path, max_steps=2)
    done = launch(tmp_path, argv, HF_ROCM_TUNE_FAULT="kind=zero,stage=gradients,count=1", HF_ROCM_TUNE_SPLIT="1")
    assert done.returncode == 0, done.stderr[-3000:]
    report = report_of(tmp_path / "out")
    assert report["ranks"] == 2
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0
    assert report["gradients"]["mismatches"] == report["gradients"]["recovered"] > 0


@pytest.mark.long
def test_ctrl_c_in_the_notebook_saves_a_checkpoint_and_ends_all_processes(tmp_path: Path) -> None:
    """The interrupt button sends SIGINT to the kernel's process group, as a terminal does."""
    argv = job(tmp_path, max_steps=100000, logging_steps=1)
    (tmp_path / "launch.py").write_text(LAUNCH)
    with (tmp_path / "said").open("w") as said_to:
        kernel = subprocess.Popen(
            [sys.executable, str(tmp_path / "launch.py"), json.dumps(argv)],
            stdout=said_to,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_ROCM_TUNE_SPLIT": "1"},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 240
        while not log_rows((tmp_path / "said").read_text()):
            assert time.monotonic() < deadline and kernel.poll() is None, (tmp_path / "said").read_text()[-3000:]
            time.sleep(0.1)
        os.killpg(kernel.pid, signal.SIGINT)
        assert kernel.wait(240) != 0
    finally:
        if kernel.poll() is None:
            os.killpg(kernel.pid, signal.SIGKILL)
    said = (tmp_path / "said").read_text()
    assert said.count("interrupted: stopped by Ctrl-C, checkpoint-") == 1, said[-3000:]
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert manifest.verify(saved) == []
