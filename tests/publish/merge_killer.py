"""Merges in processes of their own, forked from one that has imported everything and runs no tensor operation.

Reads one JSON request a line and answers one JSON line:

    {"adapter": ..., "base": ..., "out": ..., "kill_after": seconds or null, "file_limit": bytes or null, "term": bool}
        -> {"code": exit code, or minus the signal's number, "seconds": s, "stderr": what it wrote there}
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
from typing import Any


def _child(request: dict[str, Any], errors: str) -> None:
    handle = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(handle, 2)
    os.dup2(handle, 1)
    if request.get("file_limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], request["file_limit"]))
    from hf_rocm_tune import cli

    code = cli.main(["merge", request["adapter"], request["out"], "--base", request["base"]])
    sys.stderr.flush()
    os._exit(code)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as errors:
        begun = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            try:
                _child(request, errors.name)
            finally:
                os._exit(1)
        if request.get("kill_after") is not None:
            time.sleep(request["kill_after"])
            os.kill(pid, signal.SIGTERM if request.get("term") else signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        seconds = time.perf_counter() - begun
        text = open(errors.name, encoding="utf-8", errors="replace").read()  # noqa: SIM115 - read at once
    return {"code": os.waitstatus_to_exitcode(status), "seconds": seconds, "stderr": text}


def main() -> None:
    """Imports everything, says so, and serves requests until standard input closes."""
    import bitsandbytes  # noqa: F401

    from hf_rocm_tune.machine import process
    from hf_rocm_tune.publish import merge  # noqa: F401

    process.prepare_process(os.environ)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
