"""Recipes: YAML files of flags and environment variables, and what a command line says together with its recipe."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hf_rocm_tune.configs import RECIPES, start_of
from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.foreign import parse_yaml, read_text
from hf_rocm_tune.lifecycle.launcher_flags import bare, take_flag
from hf_rocm_tune.machine import variables
from hf_rocm_tune.redaction import print_line, remember
from hf_rocm_tune.settings.flags import CONFIG, canonical, flags, full_name
from hf_rocm_tune.settings.verbs import VERBS


class RecipeFile(NamedTuple):
    path: Path
    values: Mapping[str, Any]  # YAML values by flag, not yet checked
    env: Mapping[str, str]  # environment variables that `variables` knows


def method_of(recipe: RecipeFile) -> Method:
    """The verb that a recipe is for: the one of the command in its opening comment, else the first that has its keys.

    Where no verb has all keys, the one that has most of them: its message names the others.
    """
    stated = start_of(recipe.path.read_text(encoding="utf-8")).split()[1:2]
    if stated and stated[0] in VERBS:
        return next(verb for verb in VERBS if verb == stated[0])
    return min(VERBS, key=lambda verb: len(recipe.values.keys() - flags(verb)))


def read_recipe(given: str | Path) -> RecipeFile:
    """Read a recipe: a file at that path, which wins over a recipe of that name."""
    path = Path(given)
    known = RECIPES.names()
    if str(given) in known and not os.path.isfile(path):
        path = RECIPES.path(str(given))
    elif not os.path.exists(path):
        hint = ""
        if path.name == str(given):  # a name, not a path
            nearest = difflib.get_close_matches(path.stem, known, n=1, cutoff=0.5)
            if nearest:
                hint = f"did you mean {nearest[0]}? "
        raise UsageError(
            f"recipe {given} does not exist: {hint}give {CONFIG} the path of a YAML file, or a name that "
            "`hf-rocm-tune recipes ls` lists"
        )
    try:
        content = parse_yaml(read_text(path), _NoDuplicates)
    except OSError as error:
        raise UsageError(f"recipe {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"recipe {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or error
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"recipe {path}{where} is not valid YAML: {problem}") from error
    if not isinstance(content, dict):
        got = "an empty file" if content is None else f"a {type(content).__name__}"
        raise UsageError(f"recipe {path} must be a mapping of flag names to values, got {got}")
    env = content.pop("env", None) or {}
    if not isinstance(env, dict) or any(isinstance(v, dict | list) or v is None for v in env.values()):
        raise UsageError(f"recipe {path}: `env` must map variable names to plain values, got {env!r}")
    foreign = [str(name) for name in env if not variables.covers(str(name))]
    if foreign:
        raise UsageError(
            f"recipe {path}: `env` may set variables of ROCm, RCCL and torch that hf-rocm-tune knows, "
            f"not {', '.join(foreign)}: remove them, or set them in your shell"
        )
    remember(content)
    values: dict[str, Any] = {}
    for key, value in content.items():  # which may have dashes or be aliases
        name = full_name(bare(str(key)))
        if name in values:
            raise UsageError(f"recipe {path}: {key} and another key are the same flag, --{name}; keep one")
        values[name] = value
    return RecipeFile(path=path, values=values, env={str(key): str(value) for key, value in env.items()})


def apply_environment(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Set the ``env`` of the recipe on this command line, and print it, before torch is imported; what is set stays."""
    recipe, _ = recipe_of(argv)
    if recipe is None:
        return
    for name, value in recipe.env.items():
        if name not in environ:
            environ[name] = value
            if environ.get("RANK", "0") == "0":
                # As a YAML comment, so that `--print_config > recipe.yaml` stays a recipe.
                print_line(f"# hf-rocm-tune: recipe {recipe.path} sets {name}={value}")


class _NoDuplicates(yaml.SafeLoader):
    """A YAML loader that refuses a key that is given twice; PyYAML's own silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge")]
        for number, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:number]]:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep=deep)


# ---- a command line and its recipe ----------------------------------------------------------------------------------


def recipe_of(argv: Sequence[str]) -> tuple[RecipeFile | None, list[str]]:
    """The recipe of a command line, and the rest of it, without aliases."""
    path, rest = take_flag(canonical(argv), CONFIG)
    return None if path is None else read_recipe(path), rest


def typed(argv: Sequence[str]) -> tuple[RecipeFile | None, dict[str, Any]]:
    """The recipe of a command line, and its flags with dashes, each with its first value or None."""
    recipe, rest = recipe_of(argv)
    if "--" in rest:
        rest = rest[: rest.index("--")]
    given: dict[str, Any] = {}
    last = ""
    for argument in rest:
        if argument.startswith("--") and " " not in argument:  # as in argparse: one with a space is a value
            last, equals, value = argument.partition("=")
            given[last] = value if equals else None
        elif last and given[last] is None:
            given[last] = argument
    return recipe, given


def words_before_flags(argv: Sequence[str]) -> list[str]:
    """What a command line begins with that belongs to no flag."""
    return list(itertools.takewhile(lambda argument: not argument.startswith("-"), argv))


def given_value(argv: Sequence[str], name: str) -> Any:
    """The value of a flag as typed, or else as in the recipe; None where neither has it."""
    recipe, given = typed(argv)
    values = {bare(flag): value for flag, value in given.items()}
    if name in values:
        return values[name]
    if recipe is None:
        return None
    return recipe.values.get(name)


def asks_for_split(argv: Sequence[str]) -> bool:
    """Whether a command line or its recipe splits one model over several cards."""
    recipe, given = typed(argv)
    names = [bare(flag) for flag in given]
    if recipe is not None:
        names += recipe.values
    return "split_layers" in names
