"""Create ``.venv`` with the right build of torch and install the project into it. Standard library only.

    python3 scripts/setup_env.py            what `make setup` runs
    python3 scripts/setup_env.py --dry-run  say which torch it would be, and why

Which torch, unless HF_ROCM_TUNE_TORCH says otherwise:

    an AMD GPU for which the ROCm wheel has kernels     the ROCm build, from PyTorch's own index
    an NVIDIA GPU                                       the plain wheel
    neither                                             the CPU build

HF_ROCM_TUNE_TORCH is one of ``rocm7.2`` (or another ROCm version), ``cpu``, ``cuda``, ``keep`` (the torch that this
Python, its virtual environment, or an existing .venv already has), a pip requirement such as ``torch==2.13.0``, or the
address of an index. Whatever it is, torch 2.10 or newer is needed.

``.venv`` holds a state file from its first moment. Only a set-up that ran to its end writes ``ready`` into it, so an
interrupted one is started afresh; a ``.venv`` without the file is not ours and is not touched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STATE = VENV / "hf_rocm_tune_setup.json"
KEPT = "hf_rocm_tune_kept.pth"  # in .venv: leads to the environment whose torch is kept
VARIABLE = "HF_ROCM_TUNE_TORCH"

MINIMUM_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 14)  # for a newer one torch, bitsandbytes and others have no wheels
OLDEST_TORCH = (2, 10)
TORCH = "2.13.0"
TRITON = "3.7.1"  # what the GPU builds of that torch bring; beside the CPU build it compiles kernels in tests
ROCM = "rocm7.2"  # the ROCm that torch 2.13 is built with
INDEX = "https://download.pytorch.org/whl/"
WSL_PAGE = "https://rocm.docs.amd.com/projects/radeon-ryzen/en/latest/docs/install/installrad/wsl/howto_wsl.html"
# Architectures in the rocm7.2 wheel (astral-sh/uv#18730). An integrated GPU that is not among them cannot use it.
WHEEL_ARCHITECTURES = frozenset(
    f"gfx{name}" for name in (900, 906, 908, "90a", 942, 950, 1030, 1100, 1101, 1102, 1150, 1151, 1200, 1201)
)


class SetupError(Exception):
    """The set-up cannot go on; the message is one line that says what to do."""


class Attempt(NamedTuple):
    """One way of asking pip for torch; ``index_url`` replaces the configured indexes."""

    requirement: str
    index_url: str | None = None


class Choice(NamedTuple):
    """Which torch, why, and the ways of getting it in the order in which they are tried (none: keep what is there)."""

    build: str
    reason: str
    attempts: tuple[Attempt, ...]


def architecture(gfx_target_version: int) -> str:
    """The name of a KFD ``gfx_target_version``: 110000 is gfx1100, 90010 is gfx90a."""
    major, minor, step = gfx_target_version // 10000, gfx_target_version // 100 % 100, gfx_target_version % 100
    return f"gfx{major}{minor:x}{step:x}"


def amd_architectures(sysfs: Path) -> list[str]:
    """The architecture of each AMD GPU that the kernel's compute driver (KFD) lists, in node order.

    CPU nodes, and files that cannot be read or make no sense, are left out.
    """
    found = []
    nodes = sysfs / "class/kfd/kfd/topology/nodes"
    for file in sorted(nodes.glob("*/properties"), key=lambda path: (len(path.parent.name), path.parent.name)):
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # a container may list a node and forbid reading it: then torch cannot use it either
        values = {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", text, flags=re.MULTILINE)}
        if values.get("simd_count", 0) > 0 and values.get("gfx_target_version", 0) > 0:
            found.append(architecture(values["gfx_target_version"]))
    return found


def has_nvidia(proc: Path, search_path: str | None) -> bool:
    """Whether the NVIDIA driver lists a GPU, or its tool is on ``search_path`` (None: the PATH)."""
    listed = proc / "driver/nvidia/gpus"
    if listed.is_dir() and any(listed.iterdir()):
        return True
    return shutil.which("nvidia-smi", path=search_path) is not None


def rocm_choice(version: str, reason: str) -> Choice:
    """The ROCm build. The local version in the requirement makes sure that no other build slips in."""
    # Not an extra index: the wheel's own dependencies must not come from an index where anyone may take their names.
    attempts = [Attempt(f"torch=={TORCH}+{version}", INDEX + version)]
    if version != ROCM:  # torch's releases are not built for every ROCm
        attempts.append(Attempt(any_torch(), INDEX + version))
    return Choice(version, reason, tuple(attempts))


def any_torch() -> str:
    """The requirement of any torch that this project works with."""
    return f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"


def cpu_choice(reason: str, platform: str) -> Choice:
    """The CPU build: whatever the configured indexes offer under that name, then PyTorch's index, then plain torch."""
    plain = Attempt(f"torch=={TORCH}")
    if platform != "linux":  # only there is the plain wheel another build than the CPU's
        return Choice("cpu", reason, (plain,))
    return Choice("cpu", reason, (Attempt(f"torch=={TORCH}+cpu"), Attempt(f"torch=={TORCH}+cpu", INDEX + "cpu"), plain))


def overridden(value: str, platform: str) -> Choice:
    """What HF_ROCM_TUNE_TORCH asks for.

    Raises:
        SetupError: it is none of the forms that the variable may have.
    """
    reason = f"{VARIABLE}={value}"
    if value == "keep":
        return Choice("keep", reason, ())
    if value == "cpu":
        return cpu_choice(reason, platform)
    if value == "cuda":
        return Choice("cuda", reason, (Attempt(f"torch=={TORCH}"),))
    if re.fullmatch(r"rocm\d+(\.\d+)*", value):
        return rocm_choice(value, reason)
    if re.match(r"torch\s*([=<>~!@]|$)", value) or value.endswith(".whl"):
        return Choice("custom", reason, (Attempt(value),))
    if re.match(r"(https?|file)://", value):
        return Choice("custom", reason, (Attempt(any_torch(), value),))
    raise SetupError(
        f"{reason} is not understood: use {ROCM}, cpu, cuda, keep, a requirement such as torch=={TORCH}, or an index"
    )


def decide(
    *,
    sysfs: Path,
    proc: Path,
    search_path: str | None,
    override: str | None,
    platform: str,
    devices: Path = Path("/dev"),
) -> Choice:
    """Which torch this machine gets.

    Args:
        sysfs: ``/sys``, or a tree that stands for it.
        proc: ``/proc``, or a tree that stands for it.
        search_path: where ``nvidia-smi`` is looked for; None is the PATH.
        override: the value of HF_ROCM_TUNE_TORCH; None or empty decides by the machine.
        platform: as ``sys.platform``.
        devices: ``/dev``, or a tree that stands for it.

    Raises:
        SetupError: the override is not understood.
    """
    if override:
        return overridden(override, platform)
    found = amd_architectures(sysfs)
    usable = [name for name in found if name in WHEEL_ARCHITECTURES]
    if usable:
        return rocm_choice(ROCM, f"the kernel lists an AMD GPU ({', '.join(usable)})")
    amd = f"the {ROCM} build has no kernels for {', '.join(found)}" if found else "no AMD GPU under /sys/class/kfd"
    if has_nvidia(proc, search_path):
        return Choice("cuda", f"{amd}, but an NVIDIA driver", (Attempt(f"torch=={TORCH}"),))
    if (devices / "dxg").exists():  # WSL does not say whose GPU Windows passes on
        return cpu_choice(
            f"WSL, where Linux lists no GPU. For a Radeon card install ROCm for WSL (librocdxg, {WSL_PAGE}), then run "
            f"{VARIABLE}={ROCM} make setup",
            platform,
        )
    return cpu_choice(amd if found else f"{amd}, and no NVIDIA driver", platform)


def run(*command: str | Path) -> None:
    """Run a command with its output on the terminal.

    Raises:
        SetupError: it failed; what it printed says why.
    """
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        shown = " ".join(str(part) for part in command[:4])
        raise SetupError(f"`{shown} ...` ended with {done.returncode} (see above); mend that and run make setup again")


class Environment:
    """The virtual environment, with the state file that says whether it is finished and whether we made it."""

    def __init__(self, choice: Choice, fitting: str = "cpu") -> None:
        self.choice = choice
        self.fitting = fitting  # the build that fits this machine, whatever was asked for
        self.python = VENV / "bin/python"
        # base_prefix, not prefix: make may be called from inside the activated .venv
        self.torch_key = f"{choice.build} {choice.attempts} {sys.version_info[:2]} {sys.base_prefix} {ROOT}"
        sources = [(ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes(), self.torch_key.encode()]
        self.key = hashlib.sha256(b"\0".join(sources)).hexdigest()

    def state(self) -> dict[str, str]:
        """What the state file says; empty where there is none, or only half of one."""
        try:
            value = json.loads(STATE.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def write_state(self, state: str, *, made_by: str) -> None:
        """Replace the state file in one step."""
        fresh = STATE.with_suffix(".tmp")
        content = {"state": state, "made_by": made_by, "key": self.key, "torch": self.torch_key}
        fresh.write_text(json.dumps(content), encoding="utf-8")
        os.replace(fresh, STATE)

    def is_ready(self) -> bool:
        """Whether an earlier set-up with the same inputs ran to its end."""
        state = self.state()
        return state.get("state") == "ready" and state.get("key") == self.key and self.python.exists()

    def create(self) -> None:
        """Make the virtual environment, or take the one that is there. From here on it is marked as unfinished.

        Raises:
            SetupError: ``.venv`` is not ours and may not be replaced, or venv failed.
        """
        state = self.state()
        keep = self.choice.build == "keep"
        if VENV.is_symlink():  # what it leads to may be another checkout's, with a state file of ours in it
            raise SetupError(f".venv is a link to {VENV.readlink()}: remove the link, or run make setup there")
        if VENV.is_dir() and any(VENV.iterdir()) and state.get("made_by") != "setup":
            if not keep or not self.python.exists():
                raise SetupError(f".venv was not made by make setup: move it away ({VARIABLE}=keep installs into it)")
            self.write_state("installing", made_by="user")
            return
        finished = state.get("state") == "ready" and self.python.exists()
        if finished and (keep or state.get("torch") == self.torch_key):
            self.write_state("installing", made_by="setup")
            return
        if Path(sys.prefix) == VENV:
            raise SetupError(".venv has to be made anew and this Python runs in it: `deactivate`, then run it again")
        VENV.mkdir(exist_ok=True)
        self.write_state("installing", made_by="setup")
        # The state file outlives what it speaks of: without it, what an interrupted removal left would not be ours.
        for entry in [entry for entry in VENV.iterdir() if entry != STATE]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        # keep: in a container with ROCm and torch in it, torch belongs to the interpreter itself ...
        extra = ["--system-site-packages"] if keep else []
        try:
            run(sys.executable, "-m", "venv", *extra, VENV)
        except SetupError as error:
            raise SetupError(f"{error} (on Debian and Ubuntu, `apt install python3-venv` may be missing)") from error
        # ... or, as in AMD's images, to a virtual environment, which a new one does not inherit.
        if keep and sys.prefix != sys.base_prefix:
            (own,) = VENV.glob("lib/python3*/site-packages")
            line = f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
            (own / KEPT).write_text(line, encoding="utf-8")

    def install_torch(self) -> None:
        """Try the ways of getting torch in order.

        Raises:
            SetupError: none of them worked.
        """
        failures = []
        for number, attempt in enumerate(self.choice.attempts):
            where = attempt.index_url or "the configured package index"
            if number and attempt.requirement == f"torch=={TORCH}":
                print(f"setup: no CPU build found; plain {attempt.requirement} may bring CUDA libraries of several GB")
            command = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", attempt.requirement]
            if attempt.index_url:
                command += ["--index-url", attempt.index_url]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode == 0:
                return
            failures.append(done.stderr.rstrip())
            print(f"setup: {attempt.requirement} is not to be had from {where}", flush=True)
        if failures:
            print("\n".join(failures), file=sys.stderr)
            raise SetupError(f"torch could not be installed (see above); set {VARIABLE} to what you have, or to keep")

    def install_torchvision(self) -> None:
        """Processors of pictures need the torchvision that is built for this torch. Without it only they do not work.

        Without its dependencies: a torchvision of another index would take torch to another version and build.
        """
        torch = self.torch_version()
        public, _, build = torch.partition("+")
        major, minor, patch = (*public.split("."), "0")[:3]
        if major != "2" or self.choice.build == "keep":
            return
        wanted = f"torchvision==0.{int(minor) + 15}.{patch}{f'+{build}' if build else ''}"
        index = ["--index-url", f"{INDEX}{build}"] if build else []
        command = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
        done = subprocess.run([*command, wanted, *index], stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            print(f"setup: {wanted} is not to be had: processors of pictures that need it do not work", flush=True)

    def torch_version(self) -> str:
        """The version of torch in the environment, with its local part such as ``+rocm7.2``.

        Raises:
            SetupError: there is none.
        """
        code = "from importlib.metadata import version; print(version('torch'))"
        done = subprocess.run([str(self.python), "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(f"no torch in {sys.prefix} or .venv, but {VARIABLE}=keep: install it, or unset that")
        return done.stdout.strip()

    def check_torch(self, version: str) -> None:
        """Refuse a torch that does not work.

        Raises:
            SetupError: it is older than `OLDEST_TORCH`, or not the build that was asked for.
        """
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
            oldest = f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
            raise SetupError(
                f"torch {version} is too old, {oldest} or newer is needed: {VARIABLE}={self.fitting} make setup "
                f"installs {TORCH} into .venv, and leaves this one as it is"
            )
        if self.choice.build.startswith("rocm") and "+rocm" not in version:
            raise SetupError(
                f"torch {version} came instead of a build for {self.choice.build}: a configured package index has it "
                f"(`pip config list`); set {VARIABLE}=torch==VERSION+{self.choice.build}"
            )

    def install(self) -> None:
        """Create the environment and install torch, then the project with its development tools."""
        self.create()
        self.install_torch()
        # Without the constraint, a newer torch that a dependency asks for would replace the build just chosen.
        version = self.torch_version()
        self.check_torch(version)
        self.install_torchvision()
        constraint = VENV / "torch-constraint.txt"
        triton = f"triton=={TRITON}\n" if self.choice.build == "cpu" else ""
        constraint.write_text(f"torch=={version}\n{triton}", encoding="utf-8")
        pip = (str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
        print("setup: installing the project and what it needs", flush=True)
        # The kernels are compiled in tests beside a CPU torch; a ROCm or CUDA torch brings a Triton of its own.
        extras = "dev,vision,kernel-check" if self.choice.build == "cpu" else "dev,vision"
        run(*pip, "--constraint", constraint, "--editable", f"{ROOT}[{extras}]")
        self.write_state("ready", made_by=self.state()["made_by"])


def main(arguments: list[str] | None = None) -> int:
    """Set up, or say that nothing is to be done. Returns 0, or 2 after one line on what is wrong."""
    parser = argparse.ArgumentParser(description="Create .venv with the right torch and install the project into it.")
    parser.add_argument("--dry-run", action="store_true", help="only say which torch it would be, and why")
    parser.add_argument("--sysfs-root", type=Path, default=Path("/sys"), help="read the GPUs from here (for tests)")
    parser.add_argument("--proc-root", type=Path, default=Path("/proc"), help="read the driver from here (for tests)")
    options = parser.parse_args(arguments)
    try:
        if not MINIMUM_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
            have = ".".join(str(part) for part in sys.version_info[:3])
            raise SetupError(f"Python 3.11 to 3.14 is needed, this is {have}: make PYTHON=python3.13 setup")
        machine = partial(
            decide, sysfs=options.sysfs_root, proc=options.proc_root, search_path=None, platform=sys.platform
        )
        choice = machine(override=os.environ.get(VARIABLE, "").strip() or None)
        environment = Environment(choice, machine(override=None).build)
        ready = environment.is_ready()
        if options.dry_run or not ready:
            print(f"setup: torch build {choice.build}: {choice.reason}", flush=True)
        if not options.dry_run and not ready:
            environment.install()
            print("setup: .venv is ready", flush=True)
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("setup: interrupted; the next make setup starts afresh", file=sys.stderr)
        sys.exit(130)
