"""A job that behaves like a training as far as its supervisor sees: one scene a start, and no torch.

Run as ``python-stub -m hf_rocm_tune.sft``. ``STUB`` names a directory with ``story.json``, a list of scenes (the last
one is repeated), and gets ``attempt-N`` and what the job heard. A scene:

    silent      it never begins its run
    step, phase the pulse that it leaves
    saves       steps of checkpoints that it writes
    resumed     the checkpoint it says it went on from
    orphan      it leaves a process in another session that ignores SIGTERM
    end         an exit code, a signal's name, "hang", "wait" (for a signal), or {"code": n, "message": text}
    cured       instead, it ends with 0 if its step is left out
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import TuneError
from hf_rocm_tune.lifecycle import heartbeat
from hf_rocm_tune.lifecycle.exits import run_guarded
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.run_directory import new_record, read_record, write_record

_SLEEPER = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


def main() -> int:
    """Acts one scene."""
    place = Path(os.environ["STUB"])
    story = json.loads((place / "story.json").read_text())
    number = len(list(place.glob("attempt-*")))
    (place / f"attempt-{number}").touch()
    scene = story[min(number, len(story) - 1)]
    heard: list[int] = []
    if scene["end"] in ("wait", "hang"):
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(
                each, lambda n, _: (heard.append(n), (place / "heard").write_text(repr(list(map(int, heard)))))
            )
    if not scene.get("silent") and _begin(place / "out", scene):
        return 0
    if scene.get("orphan"):
        sleeper = subprocess.Popen([sys.executable, "-c", _SLEEPER], start_new_session=True, stdout=subprocess.PIPE)
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        (place / "orphan").write_text(str(sleeper.pid))
    (place / "ready").touch()
    return _end(scene["end"], heard)


def _begin(out: Path, scene: dict[str, Any]) -> bool:
    """Begins the run and leaves a pulse; True where the step that killed it is left out."""
    out.mkdir(exist_ok=True)
    record = read_record(out) or new_record({"stub": 1})
    write_record(out, record)
    heartbeat.report_begun(run_id=record.run_id, output_dir=out, resumed_from=scene.get("resumed"))
    heartbeat.Heartbeat().beat(step=scene.get("step", 0), phase=scene.get("phase", "step"))
    for step in scene.get("saves", []):
        checkpoint = out / f"checkpoint-{step}"
        checkpoint.mkdir(exist_ok=True)
        manifest.write(checkpoint, run_id=record.run_id, step=step, status="checkpoint")
    return bool(scene.get("cured")) and scene["step"] + 1 in record.skipped_steps


def _end(end: Any, heard: list[int]) -> int:
    if isinstance(end, int):
        return end
    if isinstance(end, dict):
        error = TuneError(end["message"])
        error.exit_code = end["code"]
        raise error
    if end == "hang":
        while True:
            time.sleep(1)
    if end == "wait":
        while not heard:
            time.sleep(0.02)
        time.sleep(0.4)  # the checkpoint
        return 130
    os.kill(os.getpid(), getattr(signal, end))
    raise AssertionError("the signal did not end it")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
