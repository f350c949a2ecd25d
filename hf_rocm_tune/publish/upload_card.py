"""The model card as it is uploaded: the README.md that is there, without what the Hub refuses and what is private.

The Hub answers 400 to a card whose ``base_model`` or ``datasets`` is no id of the Hub, so a local path there is
replaced by the id that the user gave, or taken out. The local file stays as it is.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.privacy import Private, hub_id_of, scrub_json, scrub_text

# The Hub's own, from huggingface_hub.repocard.
_FRONT_MATTER = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(\r\n|\n|$))")
_IDS = ("base_model", "datasets")
_TAG_OF_A_NAME = re.compile(r"^(base_model(?::(?:adapter|finetune|merge|quantized))?|dataset):(.+)$")


def published_name(name: str, private: Private, base_model_id: str | None = None) -> str | None:
    """The id of the Hub by which a model or dataset is named in public; None where there is none.

    Args:
        name: an id of the Hub, which stays, or a path of this machine.
        base_model_id: the id that the user gave for it; without one, a path in the Hub's cache still tells its id.
    """
    if not private.is_local(name) and is_hub_id(name):
        return name
    return base_model_id or hub_id_of(name)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of an id on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def clean_card(text: str, private: Private, *, base_model_id: str | None = None) -> tuple[str, list[str]]:
    """A card that the Hub accepts and that gives nothing away.

    Args:
        text: of README.md.
        private: what is private here.
        base_model_id: id of the base model on the Hub, where it was loaded from a directory.

    Returns:
        The text, and what was changed, in words that give nothing away; the text is the same object if nothing was.

    Raises:
        UsageError: the metadata is no YAML mapping, or huggingface_hub refuses it.
    """
    found = _FRONT_MATTER.match(text)
    front, body = ("", text) if found is None else (found[0], text[found.end() :])
    changes: list[str] = []
    if found is not None:
        metadata = _read_metadata(found[2])
        cleaned = _clean_metadata(metadata, private, base_model_id, changes)
        if cleaned != metadata:
            front = f"---\n{yaml.safe_dump(cleaned, sort_keys=False, allow_unicode=True)}---\n"
    cleaned_body = scrub_text(body, private, names=False)
    if cleaned_body != body:
        changes.append("local paths or secrets in its text were replaced")
    result = front + cleaned_body if changes else text
    _validate(result)
    return result, changes


def _read_metadata(block: str) -> dict[str, Any]:
    try:
        metadata = yaml.safe_load(block)
    except yaml.YAMLError as error:
        raise UsageError(
            f"the metadata of README.md is no YAML: {error}; mend the lines between the --- marks"
        ) from error
    if metadata is not None and not isinstance(metadata, dict):
        raise UsageError("the metadata of README.md is no YAML mapping: mend the lines between the --- marks")
    return metadata or {}


def _clean_metadata(
    metadata: dict[str, Any], private: Private, base_model_id: str | None, changes: list[str]
) -> dict[str, Any]:
    """The metadata with ids of the Hub only; appends what was changed."""
    cleaned: dict[str, Any] = {}
    for key, value in metadata.items():
        if key in _IDS:
            names = value if isinstance(value, list) else [value]
            given = base_model_id if key == "base_model" else None
            ids = [published_name(str(name), private, given) for name in names if name is not None]
            kept = list(dict.fromkeys(one for one in ids if one))
            if kept != names:
                changes.append(f"{key}: {', '.join(kept) or 'taken out, it was a local path'}")
            if kept:
                cleaned[key] = kept if isinstance(value, list) else kept[0]
        elif key == "tags" and isinstance(value, list):
            cleaned[key] = _clean_tags(value, private, base_model_id)
        else:
            cleaned[key] = scrub_json(value, private, names=False)
        if key not in _IDS and cleaned[key] != value:
            changes.append(f"{key}: without local paths")
    if base_model_id and "base_model" not in cleaned:
        cleaned["base_model"] = base_model_id
        changes.append(f"base_model: {base_model_id}")
    return cleaned


def _clean_tags(tags: list[Any], private: Private, base_model_id: str | None) -> list[Any]:
    """Tags such as ``base_model:adapter:NAME`` with an id of the Hub for NAME; those without one are left out."""
    cleaned: list[Any] = []
    for tag in tags:
        named = _TAG_OF_A_NAME.match(str(tag))
        if named is not None and private.is_local(named[2]):
            public = published_name(named[2], private, base_model_id if named[1].startswith("base_model") else None)
            cleaned += [f"{named[1]}:{public}"] if public else []
        else:
            cleaned.append(scrub_text(tag, private, names=False) if isinstance(tag, str) else tag)
    return cleaned


def _validate(text: str) -> None:
    """huggingface_hub's own reading of a card; the Hub's is asked for when the card is uploaded."""
    try:
        ModelCard(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"huggingface_hub cannot read the metadata of README.md ({error}): mend it") from error
