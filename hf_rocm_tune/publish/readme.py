"""The model card, ``README.md``, from the template ``readme.md.j2``.

Foreign values are redacted and escaped for Markdown. It ends with the hash of its text: one with a correct hash is ours
and is replaced by the next one; any other ``README.md`` was written or edited by a person and is kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish import serving
from hf_rocm_tune.publish.history import Run
from hf_rocm_tune.publish.templates import render
from hf_rocm_tune.publish.values import text
from hf_rocm_tune.redaction import Private, hub_id_of, scrub_json, scrub_text

README_NAME = "README.md"
_MARK = "\n\n<!-- hf-rocm-tune wrote this card ("
# By the end of a model's class.
_TASKS = {
    "CausalLM": ("AutoModelForCausalLM", "text-generation"),
    "SequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
}


def build(
    run: Run,
    private: Private,
    *,
    method: str = "sft",
    datasets: Iterable[str] = (),
    columns: Sequence[str] = (),
    picture: str | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> str:
    """The ``README.md`` of a run, or of a checkpoint of one that has not finished, with metadata and hash.

    ``datasets`` are names and paths, ``columns`` those of the rows as the trainer reads them, ``picture`` the name of
    the file with the curve of the loss, ``adapter`` what ``adapter_config.json`` holds, None for a whole model.
    """
    base = published_names([text(run.settings, "model_name_or_path")], private, run.settings.get("hub_base_model_id"))
    base_id = base[0] if base else ""
    clean = run.without(private)
    trained = clean.trained
    ids = published_names(datasets, private)
    adapted = trained["adapter_dtype"] is not None
    auto, task = _TASKS.get(trained["model_class"].rpartition("For")[2], (trained["model_class"], None))
    held_by = "AutoTokenizer"
    sees = bool({"image", "images"} & {*columns}) and task != "text-classification"
    if sees:
        auto, task = "AutoModelForImageTextToText", "image-text-to-text"
        held_by = "AutoProcessor"
    tags = ["transformers", "trl", method, "hf-rocm-tune", "generated_from_trainer"]
    library = "transformers"
    relation = "finetune"
    if adapted:
        tags.append("lora")
        library = "peft"
        relation = "adapter"
    metadata = ModelCardData(
        library_name=library,
        tags=sorted(tags),
        base_model=base_id or None,
        base_model_relation=relation if base_id else None,
        datasets=ids or None,
        pipeline_tag=task,
    )  # licence and language are the base model's and the data's
    trainer = "RewardTrainer" if method == "reward" else f"{method.upper()}Trainer"
    repo_id = text(clean.settings, "hub_model_id") if clean.settings.get("push_to_hub") is True else ""
    body = render(
        "readme.md.j2",
        run=clean,
        trained=trained,
        name=repo_id.rpartition("/")[2] or scrub_text(run.directory.absolute().name, private).strip() or "model",
        base=base_id or Path(text(clean.settings, "model_name_or_path")).name,
        base_id=base_id,
        datasets=ids,
        columns=columns,
        picture=picture,
        repo_id=repo_id,
        trainer=trainer,
        adapted=adapted,
        scores=task == "text-classification",
        auto=auto,
        sees=sees,
        held_by=held_by,
        verdict=clean.verdict,
        served=serving.lines(scrub_json(adapter or {}, private), repo_id or "."),
    )
    whole = f"---\n{metadata.to_yaml()}\n---\n\n" + re.sub(r"\n{3,}", "\n\n", body)
    return _signed(whole.encode("utf-8", "replace").decode().rstrip()) + "\n"


def kept(file: Path) -> bytes | None:
    """The bytes of a ``README.md`` that a person wrote or edited; None if there is none or it is ours."""
    if not file.exists():
        return None
    content = file.read_bytes()
    if is_ours(content.decode("utf-8", "replace")):
        return None
    return content


def is_ours(content: str) -> bool:
    """Whether a ``README.md`` was written by `build` and not changed since."""
    return _MARK in content and content.rstrip() == _signed(content.rpartition(_MARK)[0])


def _signed(content: str) -> str:
    digest = hashlib.sha256(content.encode()).hexdigest()
    return (
        f"{content}{_MARK}{digest}); a card that was edited is kept, one that was not is replaced when training goes "
        "on -->"
    )


# ---- a README.md that a person may have edited, before it is published -----------------------------------------------


def clean_readme(content: str, private: Private, *, base_model_id: str | None = None) -> str:
    """Without private paths and secrets, and with ids as ``base_model`` and ``datasets``, as the Hub demands."""
    try:
        card = ModelCard(content, ignore_metadata_errors=False)
        before = card.data.to_dict()
        public = scrub_json(before, private, names=False)
        for key, given in (("base_model", base_model_id if before else None), ("datasets", None)):
            value = before.get(key)
            names = value if isinstance(value, list) else [value or given]
            ids = published_names([str(name) for name in names if name], private, given)
            public[key] = ids if isinstance(value, list) else next(iter(ids), None)
        if isinstance(public.get("tags"), list):  # the Hub makes those of the base model itself
            public["tags"] = [tag for tag in public["tags"] if not str(tag).startswith("base_model:")]
        public = {key: value for key, value in public.items() if value}
        front = content[: len(content) - len(card.text)]
        if public != before:
            front = f"---\n{yaml.safe_dump(public, sort_keys=False, allow_unicode=True)}---\n"
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"the metadata of README.md between the --- marks cannot be read: {error}") from error
    return front + scrub_text(card.text, private, names=False)


def published_names(names: Iterable[str], private: Private, given: Any = None) -> list[str]:
    """The ids on the Hub of models or datasets, also of paths in the Hub's cache; ``given`` for other local ones."""
    ids: list[Any] = []
    for name in names:
        if not private.is_local(name) and is_hub_id(name):
            ids.append(name)
        else:
            ids.append(given or hub_id_of(name))
    return list(dict.fromkeys(filter(None, ids)))


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of an id on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
