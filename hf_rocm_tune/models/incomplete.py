"""Names the field of a ``config.json`` that a model's code needed and did not find, from the error that it raised."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

from hf_rocm_tune.errors import first_line

#: What Python says where a value is None, or where something is not there at all.
_OF_NONE = re.compile(r"None\b|NoneType")
#: A field that a line of code reads: ``config.NAME`` or ``getattr(config, "NAME", ...)``.
_FIELD = re.compile(r"config(?:\.|, ['\"])(\w+)")


def describe(config: Any, error: Exception, *, otherwise: str = "") -> str:
    """Why a model of this configuration cannot be made: the field that is missing, else the error's first line.

    ``otherwise``: what to do where no field is missing.
    """
    fields = missing_fields(config, error)
    if not fields:
        return f"{first_line(error)}; {otherwise}" if otherwise else first_line(error)
    are = "is" if len(fields) == 1 else "are"
    return (
        f"{' and '.join(fields)} {are} missing in its config.json, or null, and its code needs a value: "
        "copy config.json again from where the model was published"
    )


def missing_fields(config: Any, error: Exception) -> list[str]:
    """Fields of a configuration, or of a part of it, whose absence made its model's code raise this error.

    ``config``: None while it is being made itself.

    Read from the line that raised, and where it is in an operation of Python or torch, from the nearest line of a model
    above it. Empty: the error has another cause.
    """
    configs = [] if config is None else list(_parts_of(config))
    if isinstance(error, AttributeError) and any(error.obj is part for part in configs):
        return [str(error.name)]
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        asked = any(re.search(r"config\b|rope", _line_of(level)) for level in _levels(error))
        return [error.args[0]] if asked else []
    if not isinstance(error, TypeError) and not _OF_NONE.search(str(error)):
        return []
    for level in _levels(error):
        fields = list(dict.fromkeys(_missing_in(level, configs)))
        if fields:
            in_file: dict[str, str] = {}
            for part in configs:
                in_file |= part.attribute_map
            return [in_file.get(name, name) for name in fields]
    return []


def _parts_of(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts_of(part)


def _levels(error: Exception) -> list[TracebackType]:
    """The levels of an error's traceback, the innermost first."""
    levels = []
    level = error.__traceback__
    while level is not None:
        levels.append(level)
        level = level.tb_next
    return levels[::-1]


def _line_of(level: TracebackType) -> str:
    return linecache.getline(level.tb_frame.f_code.co_filename, level.tb_lineno)


def _missing_in(level: TracebackType, configs: list[Any]) -> Iterator[str]:
    """The fields that are None and that the line reads, directly or through a variable or an attribute."""
    line = _line_of(level)
    frame = level.tb_frame
    yield from (name for name in _FIELD.findall(line) if _is_none(configs, name))
    owner = frame.f_locals.get("self")
    for name in re.findall(r"\bself\.(\w+)", line):
        if owner is None or getattr(owner, name, 0) is not None:
            continue
        if hasattr(owner, "model_type"):  # the configuration itself
            yield name
        else:
            yield from _assigned(type(owner).__init__, f"self.{name}", configs)
    for name in re.findall(r"\b[a-z_]\w*", line):
        if name in frame.f_locals and frame.f_locals[name] is None:
            yield from _assigned(frame.f_code, name, configs)


def _assigned(code: Any, target: str, configs: list[Any]) -> Iterator[str]:
    """The fields that are None among those of which a function makes a variable or an attribute."""
    with suppress(OSError, TypeError, SyntaxError):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(assigned) == target for assigned in targets):
                yield from (name for name in _FIELD.findall(ast.unparse(node.value)) if _is_none(configs, name))


def _is_none(configs: list[Any], name: str) -> bool:
    return any(getattr(part, name, 0) is None for part in configs)
