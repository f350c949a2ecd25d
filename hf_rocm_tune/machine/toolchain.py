"""What Triton needs to compile its driver at first use, asked of the compiler itself. Imports no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig

_SECONDS = 20


def missing_for_triton() -> str:
    """What is missing to compile against Python's headers, and the package that has it; empty if nothing is.

    The compiler and the directory of headers are chosen as Triton chooses them.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler: install gcc"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's own has no headers
    headers = sysconfig.get_paths(scheme=scheme)["include"]
    command = [compiler, "-x", "c", "-fsyntax-only", f"-I{headers}", "-"]
    try:
        done = subprocess.run(
            command, input="#include <Python.h>\n", capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the C compiler {compiler} cannot be run: {error}"
    if not done.returncode:
        return ""
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return f"{headers} has no Python.h: install python3-dev (python3-devel)"
    said = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
    return f"{compiler} does not compile a file that includes Python.h ({said[-200:]}): install gcc and libc6-dev"
