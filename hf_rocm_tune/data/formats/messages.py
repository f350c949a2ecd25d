"""Reading messages as toolkits write them: their turns, roles, parts and calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from hf_rocm_tune.data.formats.names import CALL_ROLES, ROLES, STANDARD_ROLES, TEXT_PARTS


def turns_of(value: Any) -> list[Any]:
    """Messages: a list of them, one, or lists of their roles and contents, as older `datasets` keep them."""
    if isinstance(value, dict) and isinstance(value.get("role") or value.get("from"), list):
        return [dict(zip(value, message, strict=False)) for message in zip(*value.values(), strict=False)]
    return value if isinstance(value, list) else [value]


@lru_cache(maxsize=1024)
def standard_role(role: str) -> str:
    """TRL's name of a role, whatever its case; a role that is not known stays."""
    lower = role.strip().lower()
    if lower in STANDARD_ROLES:
        return lower
    return ROLES.get(lower, role)


@lru_cache(maxsize=1024)
def is_call_role(role: str) -> bool:
    """Whether a message of this role is a call of a function, written as JSON."""
    return role.strip().lower() in CALL_ROLES


def is_text(content: list[Any]) -> bool:
    """Whether all parts of a message's content are text."""
    return all(part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str) for part in content)


def arguments_of(calls: Any) -> Iterator[Any]:
    """The arguments of a message's calls, as they stand."""
    listed = calls if isinstance(calls, list) else [calls]
    for call in listed:
        if isinstance(call, dict):
            yield (call.get("function") or call).get("arguments")


def is_call(text: Any) -> bool:
    """Whether a text is the JSON of a call or of a list of calls, each with its name."""
    try:
        calls = json.loads(text)
    except (TypeError, json.JSONDecodeError):
        return False
    listed = calls if isinstance(calls, list) else [calls]
    return all(isinstance(call, dict) and "name" in call for call in listed)


def listed_tools(tools: Any) -> list[Any]:
    """A row's tools, which may be JSON."""
    listed = json.loads(tools) if isinstance(tools, str) else tools
    return list(listed or ())


def are_bare(tools: Any) -> bool:
    """Whether tools lack OpenAI's ``function`` around them, as in LLaMA-Factory's files."""
    return any(isinstance(tool, dict) and "function" not in tool for tool in listed_tools(tools))


def begins_with_prompt(messages: list[Any]) -> bool:
    """Whether the first of these messages is no answer."""
    first = messages[0] if messages else None
    if not isinstance(first, Mapping):
        return False
    role = first.get("role", first.get("from"))
    return isinstance(role, str) and standard_role(role) in ("user", "system", "developer")
