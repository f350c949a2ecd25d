"""``hf-rocm-tune VERB``: one function for each verb, with its imports inside.

Importing this, ``--help`` and ``--version`` import no torch.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args

from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.errors import CommandParser, UsageError
from hf_rocm_tune.lifecycle.exits import PROGRAM, run_guarded, sigterm_as_interrupt
from hf_rocm_tune.lifecycle.heartbeat import outlive_reader
from hf_rocm_tune.lifecycle.launcher_flags import CONFIG_FLAG, bare, launcher_flags
from hf_rocm_tune.paths import expand_user
from hf_rocm_tune.settings import flags
from hf_rocm_tune.settings.recipes import RecipeFile, apply_environment, method_of, read_recipe
from hf_rocm_tune.settings.start import answered
from hf_rocm_tune.settings.verbs import VERBS as TRAINING_VERBS

if TYPE_CHECKING:
    from hf_rocm_tune.configs import NamedFiles


Verb = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (``sys.argv`` unless given), and give the exit code (see ``errors``)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_job = arguments[:1] in [["run"], *([verb] for verb in get_args(Method))]
    if is_job and not {"-h", "--help"} & set(arguments):
        outlive_reader()  # of a job, whose end waits for its checkpoint
    return run_guarded(lambda: _until_read(arguments), argv=arguments, process_ends=argv is None)


def _until_read(argv: Sequence[str]) -> int:
    """`_dispatch`; where whoever reads the output (head, a pager) has seen enough, the code that SIGPIPE would give."""
    try:
        code = _dispatch(argv)
        if sys.stdout is not None:  # closed by the shell: >&-
            sys.stdout.flush()
        return code
    except OSError as error:
        full = error.errno == errno.ENOSPC and error.filename is None
        if not full and not isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        if full:
            raise UsageError("no space is left on the disk that the output goes to: free some") from error
        return 128 + signal.SIGPIPE


def configs(argv: Sequence[str]) -> int:
    """accelerate configurations, by name: how a job is launched, on which cards (`--accelerate_config`)"""
    from hf_rocm_tune.configs import CONFIGS

    wanted = _shipped(CONFIGS, configs, argv, path="print the path of one")
    if wanted.action == "ls":
        width = max(map(len, CONFIGS.names()))
        for name in CONFIGS.names():
            print(f"{name:<{width}}  {CONFIGS.describe(name)}")
    elif wanted.action == "path":
        print(CONFIGS.path(wanted.name))
    return 0


def recipes(argv: Sequence[str]) -> int:
    """recipes, by name: what a job trains, all its settings (`sft --config`)"""
    from hf_rocm_tune.configs import RECIPES, planned_memory, start_of

    wanted = _shipped(
        RECIPES, recipes, argv, show="print one, by name or path", validate="check one without model and card"
    )
    if wanted.action == "ls":
        for name in RECIPES.names():
            start = start_of(RECIPES.path(name).read_text(encoding="utf-8"))
            print(f"{name}\n  {RECIPES.describe(name)}\n  memory: {planned_memory(name)}\n  start: {start}")
        print("\nFlags after the recipe's name override it: --model and --dataset take your own.")
    elif wanted.action == "show":
        print(read_recipe(wanted.name).path.read_text(encoding="utf-8"), end="")
    elif wanted.action == "validate":
        _validate(read_recipe(wanted.name))
    return 0


def _validate(recipe: RecipeFile) -> None:
    """Refuse a recipe that cannot be run: its names, values, libraries and local files."""
    from hf_rocm_tune.machine import process

    process.prepare_process(os.environ)  # before the libraries that what follows imports
    from hf_rocm_tune.settings import arguments
    from hf_rocm_tune.train.refusals import check_loggers, check_optimizer

    left_out = [name for name in ("bf16", "fp16") if recipe.values.get(name) and not process.has_accelerator()]
    words = [flags.CONFIG, str(recipe.path), *(f"--{name}=false" for name in left_out)]
    method = method_of(recipe)
    job = arguments.parse(words, method=method)
    check_loggers(job.training.report_to)
    check_optimizer(job.training)
    files = {name: str(recipe.values.get(name, "")) for name in ("model_name_or_path", "dataset_name")}
    lost = [
        f"{name} {file}" for name, file in files.items() if file[:1] in tuple("./~") and not expand_user(file).exists()
    ]
    if lost:
        raise UsageError(f"{', '.join(lost)}: no such file or directory; correct the path, or give a Hub id")
    unchecked = ", ".join(["the model", "the data", *(f"{name} (no GPU here)" for name in left_out)])
    print(f"{recipe.path}: {len(recipe.values)} settings, all valid for {method}; only a run can check {unchecked}")


def _shipped(files: NamedFiles, verb: Verb, argv: Sequence[str], **others: str) -> argparse.Namespace:
    """Read the command line of a verb that lists and copies files; the copy is made here."""
    parser = CommandParser(prog=f"{PROGRAM} {verb.__name__}", description=verb.__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="|".join(["ls", *others, "cp"]))
    actions.add_parser("ls", help="list the names and purposes")
    for action, meaning in {**others, "cp": "copy one, to edit it"}.items():
        verbs = actions.add_parser(action, help=meaning)
        verbs.add_argument("name")
    verbs.add_argument("dest", help="copy to this file or existing directory")
    verbs.add_argument("--force", action="store_true", help="replace an existing file")
    wanted = parser.parse_args(argv or ["ls"])
    if wanted.action == "cp":
        print(files.copy(wanted.name, wanted.dest, overwrite=wanted.force))
    return wanted


def version(argv: Sequence[str]) -> int:
    """print the version"""
    from hf_rocm_tune.version import __version__

    CommandParser(prog=f"{PROGRAM} version", description=version.__doc__).parse_args(argv)
    print(f"{PROGRAM} {__version__}")
    return 0


def env(argv: Sequence[str]) -> int:
    """show which environment variables were set, kept or are harmful, and why"""
    from hf_rocm_tune.machine import variables

    parser = CommandParser(prog=f"{PROGRAM} env", description=env.__doc__)
    parser.add_argument("--strict", action="store_true", help="exit with 1 on a warning or an error")
    wanted = parser.parse_args(argv)
    decisions = variables.DECISIONS  # made at the package's import
    print(variables.explain(decisions))
    bad = [decision.variable for decision in decisions if decision.action in ("warn", "error")]
    if wanted.strict and bad:
        print(f"{PROGRAM} env --strict: {', '.join(dict.fromkeys(bad))}: see `{PROGRAM} env`", file=sys.stderr)
    return int(wanted.strict and bool(bad))


def plan(argv: Sequence[str]) -> int:
    """memory and speed of a training job, and the fastest settings that fit; no weights, no GPU"""
    from hf_rocm_tune.lifecycle.launch import environment
    from hf_rocm_tune.plan.command import main as plan_job
    from hf_rocm_tune.sft import prepare, uncollected

    def read_rows(words: Sequence[str], method: Method) -> tuple[list[int], dict[str, Any], Any]:
        return import_module("hf_rocm_tune.job.run").read_rows(words, method)

    # bitsandbytes compiles four functions for CPUs when it is imported, and for that loads torch's whole compiler.
    with uncollected(), environment({"TORCHDYNAMO_DISABLE": "1"}):
        return plan_job(argv, prepare=prepare, read_rows=read_rows)


def _module(name: str, what: str) -> Verb:
    """A verb that is the ``main`` of a module."""

    def command(argv: Sequence[str]) -> int:
        code: int = import_module(f"hf_rocm_tune.{name}").main(list(argv))
        return code

    command.__doc__ = what
    return command


def _with_model(name: str, what: str) -> Verb:
    """A verb that loads a model; its flags are checked before torch is imported."""

    def command(argv: Sequence[str]) -> int:
        from hf_rocm_tune.publish import commands

        parser = CommandParser(prog=f"{PROGRAM} {name}", description=what)
        getattr(commands, f"add_{name}_flags")(parser)
        wanted = parser.parse_args(argv)

        from hf_rocm_tune.sft import prepare, uncollected

        with nullcontext() if name == "chat" else sigterm_as_interrupt():  # in a chat Ctrl-C only stops an answer
            code: int = getattr(commands, name)(wanted, uncollected()(prepare))
        return code

    command.__doc__ = what
    return command


def _training(verb: Method) -> Verb:
    """A training verb; the names of its flags are checked before large imports."""

    def command(argv: Sequence[str]) -> int:
        from hf_rocm_tune.lifecycle.launch import launch, split

        line = split(argv)
        if answered(verb, line.job):
            return 0
        apply_environment(line.job, os.environ)
        return launch(f"hf_rocm_tune.{verb}", line.job, accelerate_config=line.accelerate_config, extra=line.launcher)

    what = TRAINING_VERBS[verb].what
    command.__doc__ = f"{what[0].lower()}{what[1:].rstrip('.')}; every flag of `trl {verb}`"
    return command


def script(argv: Sequence[str]) -> int:
    """any training script, unmodified, with every copy verified"""
    from hf_rocm_tune.lifecycle.launch import launch, split
    from hf_rocm_tune.script import USAGE, check_file

    options, file, arguments = _script_parts(argv)
    if file is None:
        if {"-h", "--help"} & set(options):
            print(USAGE, end="")
            return 0
        raise UsageError(f"script: which one? `{PROGRAM} script FILE [ARGS]`")
    check_file(file)
    line = split(options)
    if line.job:
        raise UsageError(f"script: {line.job[0]} is no flag of accelerate's launcher; the script's own follow its name")
    return launch(
        "hf_rocm_tune.script",
        [file, *arguments],
        accelerate_config=line.accelerate_config,
        extra=line.launcher,
        passes_exit_code=True,
    )


def _script_parts(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """The launcher's flags, the script, and the script's arguments."""
    takes_value = {name for name, value in launcher_flags().items() if value} | {bare(CONFIG_FLAG)}
    number = 0
    while number < len(argv) and argv[number].startswith("-"):
        follows = "=" not in argv[number] and bare(argv[number]) in takes_value
        number += 2 if follows else 1
    if number >= len(argv):
        return list(argv), None, []
    return list(argv[:number]), argv[number], list(argv[number + 1 :])


_SFT = _training("sft")
VERBS: dict[str, Verb] = {
    "sft": _SFT,
    "train": _SFT,
    **{verb: _training(verb) for verb in TRAINING_VERBS if verb != "sft"},
    "script": script,
    "run": _module(
        "lifecycle.supervisor",
        "supervise a training command: after a crash or a stall it goes on from its newest checkpoint",
    ),
    "doctor": _module("doctor.command", "check whether this machine is ready to train, and how to fix it"),
    "plan": plan,
    "configs": configs,
    "recipes": recipes,
    "env": env,
    "demo": _module("demo.__main__", "fine-tune a small model in a few minutes, with no network"),
    "report": _module("publish.page", "a run as one HTML page: curves, verification, incidents"),
    "push": _module("publish.push", "upload a finished run to the Hugging Face Hub, and check the hashes there"),
    "verify": _module("publish.verify", "whether a result and its base are what they were, and who signed it"),
    "merge": _with_model("merge", "merge an adapter into its base, verified: a model that plain transformers loads"),
    "generate": _with_model("generate", "answers to prompts, from an adapter, a model or the Hub"),
    "chat": _with_model("chat", "a conversation with an adapter, a model or one from the Hub"),
    "version": version,
}


#: What other toolkits and newcomers call a verb.
_ELSEWHERE = {
    **dict.fromkeys(("finetune", "tune", "lora", "qlora", "fit"), "sft"),
    **dict.fromkeys(("inference", "infer", "predict", "complete"), "generate"),
    **dict.fromkeys(("export", "fuse"), "merge"),
    **dict.fromkeys(("upload", "publish"), "push"),
    **dict.fromkeys(("check", "diagnose"), "doctor"),
    **dict.fromkeys(("estimate", "memory", "vram"), "plan"),
}


def _dispatch(argv: Sequence[str]) -> int:
    """Find the verb and run it."""
    if argv[:1] == ["help"]:  # `help VERB`
        argv = [*argv[1:2], "--help"]
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    verb, *rest = argv
    if verb == "--version":
        verb = "version"
    if verb not in VERBS:
        meant = _ELSEWHERE.get(verb.replace("-", "").lower(), verb)
        nearest = difflib.get_close_matches(meant, VERBS, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise UsageError(f"unknown verb {verb!r}: {hint}there are {', '.join(VERBS)}")
    return VERBS[verb](rest)


def _help() -> str:
    lines = [f"usage: {PROGRAM} VERB ...", "", "verbs:"]
    for name, verb in VERBS.items():
        meaning = "the same as sft" if name == "train" else verb.__doc__
        lines.append(f"  {name:<8} {meaning}")
    lines += ["", f"`{PROGRAM} VERB --help` describes a verb."]
    return "\n".join(lines)
