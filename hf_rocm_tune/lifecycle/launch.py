"""Start a training job through accelerate's own launcher, in this process, and end as the job ended.

A failure is reported as our processes recorded it (``exits``), without the launcher's traceback and exit code 1.
Signals are passed on to the training processes once, and waited for without a limit, because they write a checkpoint
first; torch's elastic agent would kill them 30 seconds later (torch 2.13, ``launcher/api.py``).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import yaml

from hf_rocm_tune import configs
from hf_rocm_tune.errors import StallError, UsageError, listed
from hf_rocm_tune.foreign import parse_yaml, read_text
from hf_rocm_tune.lifecycle.exits import (
    ASKED_FILE,
    ENDING_SIGNALS,
    EXIT_FILE_VARIABLE,
    INTERRUPTED,
    PROGRAM,
    REFUSED_CODES,
    complete,
    handling,
    read_exit_record,
    run_guarded,
)
from hf_rocm_tune.lifecycle.launcher_flags import CONFIG_FLAG, bare, launcher_flags, take_flag
from hf_rocm_tune.machine import process, torch_build
from hf_rocm_tune.redaction import print_line
from hf_rocm_tune.safetensors_header import read_header
from hf_rocm_tune.survive.atomic import write_text_atomic

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_CHOICE = {(False, False): "cpu", (False, True): "cpu_dual", (True, False): "single_rx7900xt"}  # GPU, several
_ENDED_BY_REQUEST = frozenset({*(-number for number in ENDING_SIGNALS), *(128 + number for number in ENDING_SIGNALS)})


class CommandLine(NamedTuple):
    """A command line taken apart."""

    accelerate_config: str | None
    launcher: list[str]  # flags of ``accelerate launch`` with their values
    job: list[str]  # everything else; the job itself refuses what it does not know


def split(argv: Sequence[str]) -> CommandLine:
    """Tell the launcher's flags from the job's."""
    accelerate_config, rest = take_flag(argv, CONFIG_FLAG)
    launcher: list[str] = []
    job: list[str] = []
    arguments = iter(rest)
    for argument in arguments:
        takes_value = launcher_flags().get(bare(argument)) if argument.startswith("--") else None
        if takes_value is None:
            job.append(argument)
            continue
        launcher.append(argument)
        if takes_value and "=" not in argument:
            value = next(arguments, None)
            if value is not None:
                launcher.append(value)
    return CommandLine(accelerate_config, launcher, job)


def launch(
    entry: str,
    argv: Sequence[str],
    *,
    accelerate_config: str | None,
    extra: Sequence[str],
    passes_exit_code: bool = False,
) -> int:
    """Run ``python -m ENTRY ARGV`` in as many processes as the configuration says.

    Args:
        entry: module to run.
        argv: its arguments.
        accelerate_config: name or path of the launcher's configuration; by the machine where it is None.
        extra: flags for Accelerate's launcher.
        passes_exit_code: a process's exit code that it did not record is returned as it is (a script's own), not as 1.

    Raises:
        UsageError: the launcher refuses its flags, or its configuration cannot be used.
        StallError: the processes could not meet.
    """
    quiet = "quiet" in _given(extra)
    if quiet:
        os.environ["HF_ROCM_TUNE_QUIET"] = "1"
    torch_build.check_torch()  # accelerate's launcher imports it
    flags = _config_flags(accelerate_config, extra, quiet=quiet or _prints_a_document(argv))
    arguments = _parse_launcher_flags([*flags, *extra, "-m", entry, *argv])
    kind = _content(arguments.config_file).get("distributed_type", "NO")
    flagged = arguments.multi_gpu or arguments.use_fsdp or arguments.use_deepspeed
    if (arguments.num_processes or 1) > 1 and kind in ("NO", "MULTI_CPU") and not flagged:
        raise UsageError(
            f"--num_processes {arguments.num_processes} with {arguments.config_file} would start one process; "
            f"use {CONFIG_FLAG} dual_rx7900xt, or cpu_dual without GPUs"
        )
    if arguments.use_deepspeed or kind == "DEEPSPEED":
        process.require_deepspeed()
    return _launch(arguments, extra, passes_exit_code=passes_exit_code)


def _given(argv: Sequence[str]) -> set[str]:
    return {bare(argument) for argument in argv if argument.startswith("--")}


def _launch(arguments: Any, argv: Sequence[str], *, passes_exit_code: bool = False) -> int:
    """Run a job and give its code. A launcher above this one (the supervisor) is told what the job told us."""
    _quieten()
    arguments.quiet = False  # accelerate would hide how the job ended; its own traceback is never shown
    arguments.signals_to_handle = "SIGQUIT"  # read by torch's agent; accelerate has no flag for it
    above = os.environ.get(EXIT_FILE_VARIABLE)
    status = 1
    rank = None
    with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-") as directory:
        variables = _rendezvous(arguments, _given(argv), Path(directory))
        record = Path(directory) / "exit.json"
        asked = Path(directory) / ASKED_FILE
        try:
            with environment({**variables, EXIT_FILE_VARIABLE: str(record)}), _passing_on(asked):
                status, rank = _run(arguments)
                if status == 0:
                    complete()  # before signals end this process again
        except (StallError, UsageError):
            recorded = read_exit_record(record)
            if recorded is None or recorded["code"] not in REFUSED_CODES:
                raise  # else the processes could not meet again, and need not
        recorded = read_exit_record(record)
        ended_by_request = asked.exists() and status in _ENDED_BY_REQUEST
    if recorded is not None and recorded["code"] == 0:
        recorded = None
        if ended_by_request:
            status = 0
    if status == 0:
        complete()
        return 0
    if recorded is None and ended_by_request:
        print(f"{PROGRAM}: interrupted before training started", file=sys.stderr, flush=True)
        return INTERRUPTED
    follows = recorded is not None and recorded.pop("follows", False)
    if recorded is None or (follows and status != recorded["code"]):
        if passes_exit_code and status > 0:
            return status
        who = "the training process"
        if rank is not None:
            who += f" of rank {rank}"
        return _unrecorded(status, who, arguments.training_script_args)
    if follows:  # and nobody here knows what it follows from
        print_line(f"{PROGRAM}: error: {recorded['message']}", sys.stderr)
    if above:
        write_text_atomic(Path(above), json.dumps(recorded))
    return int(recorded["code"])


def _run(arguments: Any) -> tuple[int, int | None]:
    """Launch and wait: the exit status as ``subprocess`` has it, minus n for signal n, and the rank whose it is, if
    any."""
    from accelerate.commands.launch import launch_command
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    try:
        launch_command(arguments)
    except subprocess.CalledProcessError as error:
        return error.returncode, None
    except ChildFailedError as error:
        # The agent ends the others with SIGTERM, and those that lost a peer end as if stalled: the cause is another.
        statuses = [(failure.exitcode, rank) for rank, failure in sorted(error.failures.items())]
        consequences = (-signal.SIGTERM, StallError.exit_code)
        return min(statuses, key=lambda end: (end[0] in consequences, end[0] == -signal.SIGTERM))
    except SignalException as error:
        return -int(error.sigval), None
    except KeyboardInterrupt:
        return -int(signal.SIGINT), None
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1, None
    except (RendezvousError, DistError) as error:
        raise StallError(f"rendezvous failed ({error}); rerun the same command") from error
    except (ValueError, ConnectionError) as error:
        raise UsageError(f"accelerate's launcher refuses: {error}") from error
    return 0, None


def _rendezvous(arguments: Any, given: Collection[str], directory: Path) -> dict[str, str]:
    """Have the processes of one machine meet through a file in ``directory``, which nobody else may read, and which
    opens no port; variables for them. Flags that the user has ``given`` stay.

    torch's own store listens on every interface, and what is sent to its agent's is unpickled. The ranks' own store is
    at a free port of the loopback interface, see `process.prepare_process`. Every try has a store of its own: in one
    that lives over several, a new try meets the addresses of the last (pytorch#135712).
    """
    file = _content(arguments.config_file)
    machines = arguments.num_machines or file.get("num_machines") or 1
    processes = arguments.num_processes or file.get("num_processes") or 1
    if machines > 1 or processes < 2 or "rdzv_backend" in given:
        return {}
    arguments.rdzv_backend = "c10d"
    arguments.rdzv_conf = "store_type=file"
    arguments.rdzv_endpoint = str(directory / "rendezvous")
    arguments.local_addr = "127.0.0.1"
    arguments.main_process_port = 0
    if _OWN_STORE in os.environ:
        return {}
    return {_OWN_STORE: "1"}


def _content(file: str | None) -> dict[str, Any]:
    """What an accelerate configuration says; that of the user's default one where none is named."""
    from accelerate.commands.config.config_args import default_config_file

    try:
        content = parse_yaml(read_text(Path(file or default_config_file)))
    except (OSError, ValueError, yaml.YAMLError) as error:
        if file:
            raise UsageError(f"accelerate config {file} cannot be read: {error}") from error
        return {}
    return content if isinstance(content, dict) else {}


def _quieten() -> None:
    """Silence what would repeat, in a page, what our own line says."""
    import torch.distributed.run  # noqa: F401 - makes the loggers

    # torch gives each of its loggers a level of its own, so that the parent's counts for nothing.
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)  # of a flag that accelerate gives it
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)


def _unrecorded(status: int, who: str, argv: Sequence[str]) -> int:
    """Say how a process ended that could not say it itself, and give our exit code."""
    code = 128 - status if status < 0 else 1
    message = f"{who} ended with exit code {status}; its own message is above"
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        hint = {
            "SIGKILL": "; the kernel sends it when host memory runs out, see `dmesg`",
            "SIGBUS": "; the kernel sends it when a file that is mapped is cut off, or cannot be read: "
            + (listed(_cut_off(argv)) or "check the model's files and the disk"),
        }.get(name, "")
        message = f"{who} was ended by {name}{hint}"
    print_line(f"{PROGRAM}: error: {message}", sys.stderr)
    return code


def _cut_off(argv: Sequence[str]) -> list[str]:
    """Model files in directories that a command names which are shorter than their headers say."""
    cut_off = []
    named = (Path(argument.rpartition("=")[2] or os.devnull) for argument in argv)
    for directory in filter(os.path.isdir, named):
        for file in sorted(directory.glob("*.safetensors")):
            with suppress(OSError, ValueError):
                ends = [entry.end for entry in read_header(file)]
                if file.stat().st_size < max(ends, default=0):
                    cut_off.append(f"{file} is cut off")
    return cut_off


def _prints_a_document(argv: Sequence[str]) -> bool:
    """Whether stdout will be JSON or HTML, in which no line of ours may stand."""
    dry_runs = [at for at, argument in enumerate(argv) if bare(argument) == "dry_run"]
    return any({argv[at].partition("=")[2], *argv[at + 1 : at + 2]} & {"json", "html"} for at in dry_runs)


def _config_flags(accelerate_config: str | None, extra: Sequence[str], *, quiet: bool = False) -> list[str]:
    """``--config_file`` for the launcher, from a name, a path or the machine."""
    given = _given(extra)
    if accelerate_config is None:
        if "config_file" in given:
            return []
        flags = _parse_launcher_flags([*extra, "-m", "job"])
        several = "multi_gpu" in given or (flags.num_processes or 1) > 1
        gpu = process.has_accelerator()
        if (flags.num_machines or 1) > 1:
            accelerate_config = "multi_node"
        else:
            accelerate_config = _CHOICE.get((gpu, several), "dual_rx7900xt")
        if not quiet:
            # A YAML comment on stdout: `--print_config > recipe.yaml` stays a recipe, and stderr is for errors only.
            reason = "a GPU is visible" if gpu else "no GPU is visible"
            print_line(f"# {PROGRAM}: accelerate config {accelerate_config} ({reason}; {CONFIG_FLAG} chooses another)")
    path = Path(accelerate_config) if os.path.isfile(accelerate_config) else configs.path(accelerate_config)
    return ["--config_file", str(path)]


def _parse_launcher_flags(argv: Sequence[str]) -> Any:
    """The launcher's own reading of its flags, its complaint as ours."""
    from accelerate.commands.launch import launch_command_parser

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"accelerate's launcher refuses: {message}")

    parser = launch_command_parser()
    parser.error = refuse
    return parser.parse_args(list(argv))


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """``variables`` set for the processes that are started meanwhile."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _passing_on(asked: Path) -> AbstractContextManager[None]:
    """Pass signals on to the children instead of dying before them; ``asked`` is made first."""
    import psutil  # a dependency of accelerate

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.touch()
        children = psutil.Process().children()
        if not children:
            raise SystemExit(128 + number)
        from_terminal = number == signal.SIGINT and _is_foreground_job()
        for child in children:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if not (from_terminal and os.getpgid(child.pid) == os.getpgrp()):
                    child.send_signal(number)

    return handling(ENDING_SIGNALS, pass_on)


def _is_foreground_job() -> bool:
    """Whether the terminal sends Ctrl-C to this process and its process group."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # no terminal: a service, a pipeline, a cluster's job
        return False


if __name__ == "__main__":  # for the supervisor: `accelerate launch` as given, with our signals and our endings
    words = sys.argv[1:]
    sys.exit(run_guarded(lambda: _launch(_parse_launcher_flags(words), words), argv=words, process_ends=True))
