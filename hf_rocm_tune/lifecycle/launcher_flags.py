"""Which flags of a command line belong to Accelerate's launcher, read from its source: importing it takes seconds."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.upstream import source_of

CONFIG_FLAG = "--accelerate_config"
#: Names of both the launcher and ``trl sft``; they belong to the job, as in ``trl``.
SHARED_WITH_THE_JOB = frozenset({"debug", "gradient_accumulation_steps"})
_NOT_FOR_USERS = frozenset({"help", "module", "no_python", "training_script", "training_script_args"})


def bare(argument: str) -> str:
    """The name of a flag, without dashes and value."""
    return argument.partition("=")[0].lstrip("-").replace("-", "_")


def take_flag(argv: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """Remove ``FLAG VALUE`` or ``FLAG=VALUE`` from a command line."""
    value = None
    rest = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == flag:
            value = next(arguments, "")
            if not value or value.startswith("--"):
                raise UsageError(f"{flag} needs a value after it")
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
        else:
            rest.append(argument)
    return value, rest


@functools.cache
def launcher_flags() -> dict[str, bool]:
    """The flags that only the launcher reads: name without dashes, and whether a value follows."""
    flags: dict[str, bool] = {}
    parser = source_of("accelerate.commands.launch").partition("    return parser")[0]
    for call in parser.split("add_argument(")[1:]:
        takes_value = re.search(r'action="(store_|help)', call) is None
        for flag in re.findall(r'^\s*"(--\S+)"', call, re.MULTILINE):
            name = bare(flag)
            if name not in SHARED_WITH_THE_JOB | _NOT_FOR_USERS:
                flags[name] = takes_value
    return flags
