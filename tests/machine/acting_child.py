"""A child that behaves as its request says. Run by `machine.child`; imports no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.machine.child import DIRECTORY, RESULT, answer, step


def act(request: dict[str, Any]) -> dict[str, Any]:
    """One behaviour each."""
    if "pid_file" in request:
        Path(request["pid_file"]).write_text(str(os.getpid()))
    result = Path(os.environ.get(DIRECTORY, "."), RESULT)
    match request.get("act"):
        case "environ":
            return dict(os.environ)
        case "where":
            import wave

            return {"wave": wave.__file__, "cwd": os.getcwd()}
        case "raise":
            raise ValueError("a message\nof two lines")
        case "corruption":
            raise CorruptionError("wrong bytes")
        case "flood":
            for _ in range(400):
                os.write(1, b"\x1b[31m" + b"x" * (1 << 16))
            print("the last line", flush=True)
        case "leave":
            result.write_text(request["text"])
            os._exit(request["code"])
        case "grandchild":
            program = "import time; print('started', flush=True); time.sleep(600)"
            child = subprocess.Popen([sys.executable, "-c", program])
            Path(request["grandchild_file"]).write_text(str(child.pid))
        case "deaf":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            step("being deaf")
            time.sleep(600)
        case "slow":
            step("taking its time")
            time.sleep(request["seconds"])
    return {"said": request.get("say"), "pid": os.getpid()}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(sys.argv[1:]), flush=True)
    answer(act)
