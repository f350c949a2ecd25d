"""Recipe files: the YAML mapping behind ``--config``, with the names of the flags and an ``env`` mapping.

``--config`` takes the path of a file, or the name of a recipe that ships with the package. This reads and checks the
shape of a file; what the names mean is known in ``arguments``. It imports no torch, so that the ``env`` of a recipe can
be in place before torch reads it.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hf_rocm_tune import recipes
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine import gpus, process, variables
from hf_rocm_tune.redaction import one_line, remember

FLAG = "--config"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a recipe file says."""

    path: Path  # the file
    # flag names without dashes and their YAML values, not yet checked
    values: Mapping[str, Any] = field(default_factory=dict)
    # environment variables, of those that the policy (`environ`) has a row on
    env: Mapping[str, str] = field(default_factory=dict)

    def apply_environment(self, environ: MutableMapping[str, str]) -> None:
        """Put ``env`` into ``environ``, and say so on stdout; a variable that is set there already is kept."""
        for name, value in self.env.items():
            if name not in environ:
                environ[name] = value
                if environ.get("RANK", "0") == "0":
                    # As a YAML comment, so that `--print_config > recipe.yaml` stays a recipe.
                    print(f"# hf-rocm-tune: {one_line(f'recipe {self.path} sets {name}={value}')}", flush=True)


def take_flag(argv: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """Take ``FLAG VALUE`` or ``FLAG=VALUE`` out of a command line.

    Returns:
        The last value given (as argparse has it) or None, and the other arguments.

    Raises:
        UsageError: the flag is there without a value.
    """
    value, rest, arguments = None, [], iter(argv)
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


def find_recipe(given: str | Path) -> Path:
    """The file that ``--config`` means: a file of that path wins over a recipe of that name.

    Raises:
        UsageError: there is neither; the message gives the nearest name where the value could be one.
    """
    path = Path(given)
    if path.is_file():
        return path
    if str(given) in recipes.names():
        return recipes.path(str(given))
    if path.exists():
        return path  # a directory or a device: reading it says what is wrong
    nearest = difflib.get_close_matches(path.stem, recipes.names(), n=1, cutoff=0.5) if path.name == str(given) else []
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise UsageError(
        f"recipe {given} does not exist: {hint}give {FLAG} the path of a YAML file, or a name that "
        "`hf-rocm-tune recipes ls` lists"
    )


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe file.

    Args:
        path: of the file, or the name of one that ships with the package (`find_recipe`).

    Raises:
        UsageError: it is missing or unreadable, is not YAML (with the line), is not a mapping, gives a key twice, or
            sets a variable that is not a recipe's to set.
    """
    path = find_recipe(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe {path} cannot be read: {error}") from error
    try:
        content = yaml.load(text, Loader=_NoDuplicates)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"recipe {path}{where} is not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"recipe {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        found = "an empty file" if content is None else f"a {type(content).__name__}"
        raise UsageError(f"recipe {path} must be a mapping of flag names to values, got {found}")
    env = content.pop("env", None) or {}
    if not isinstance(env, dict) or any(isinstance(v, dict | list) or v is None for v in env.values()):
        raise UsageError(f"recipe {path}: `env` must map variable names to plain values, got {env!r}")
    if foreign := [str(name) for name in env if not variables.covers(str(name))]:
        raise UsageError(
            f"recipe {path}: `env` may set what `hf-rocm-tune env` knows of ROCm, RCCL and torch, "
            f"not {', '.join(foreign)}: take them out, or set them in your shell"
        )
    remember(content)
    return Recipe(
        path=path,
        values={str(key): value for key, value in content.items()},
        env={str(key): str(value) for key, value in env.items()},
    )


def apply_environment(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Apply the ``env`` of the recipe on this command line: call it before torch is imported.

    Raises:
        UsageError: as ``read_recipe``.
    """
    path, _ = take_flag(argv, FLAG)
    if path is not None:
        read_recipe(path).apply_environment(environ)


class _NoDuplicates(yaml.SafeLoader):
    """A YAML loader that refuses a key that is given twice: YAML's own keeps the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key_node.value!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


# ---- a split model needs all cards -----------------------------------------------------------------------------

_SPLIT = "--split_layers"
_SPLIT_VARIABLE = "HF_ROCM_TUNE_SPLIT"


def asks_for_split(argv: Sequence[str]) -> bool:
    """Whether a command line, or the recipe on it, splits a model.

    Raises:
        UsageError: the recipe cannot be read.
    """
    value, rest = take_flag([argument.replace("--split-layers", _SPLIT) for argument in argv], _SPLIT)
    path, _ = take_flag(rest, FLAG)
    if value is not None or path is None:
        return value is not None
    values = read_recipe(path).values
    return any(key.removeprefix("--").replace("-", "_") == _SPLIT.removeprefix("--") for key in values)


def show_all_cards(
    argv: Sequence[str], environ: MutableMapping[str, str], *, topology: gpus.Topology | None = None
) -> None:
    """Choose the cards again where the job splits a model, and say so; nothing once torch is imported.

    Args:
        argv: of the job.
        environ: the process's variables; changed.
        topology: of the machine; it is read unless given.
    """
    if not asks_for_split(argv) or "torch" in sys.modules:
        return
    environ[_SPLIT_VARIABLE] = "1"  # for processes that this one starts
    found = gpus.read_topology() if topology is None else topology
    rocm = variables.read_facts(archs=()).is_rocm
    choice = process.choose(
        () if rocm is False else found.nodes,
        environ,
        complete=found.complete,
        processes=process.local_processes(environ),
        split=True,
    )
    process.enact(choice, environ)
    made = [
        variables.Decision(variable=name, action="set", value=value, reason=choice.reason, source="--split_layers")
        for name, value in choice.variables.items()
    ]
    variables.remember(made)
    variables.announce(made)
