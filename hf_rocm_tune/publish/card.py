"""The model card, ``README.md``: base model, data, settings, code that loads the result, and how it was verified.

Its text is the template ``card.md.j2``. Foreign values (names of files, settings, texts of incidents) are redacted and
escaped for Markdown. The card is valid for the Hub: ``base_model`` and ``datasets`` are ids of the Hub or omitted. Its
code loads the result with the arguments that give the logits of training: TRL trains adapters of quantised models in
bfloat16, while PEFT loads every adapter as float32 by default; and ``device_map="auto"`` would split the base over two
cards, with copies between them.

A card ends with the hash of its text. A card with a correct hash is ours and is replaced by the next one; any other
``README.md`` was written or edited by a person and is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish import history
from hf_rocm_tune.publish.history import Row, Trained, items, plain, table, text
from hf_rocm_tune.redaction import Private, hub_id_of, scrub_json, scrub_text

CARD_NAME = "README.md"
_SIGNED = re.compile(
    r"\A(?P<text>.*)\n\n<!-- hf-rocm-tune wrote this card \((?P<sha256>[0-9a-f]{64})\)[^\n]*-->\s*\Z", re.S
)
_ACTIVE = re.compile(r"([\\`*_\[\]<>|#~$])")
_INCIDENT_COLUMNS = ("step", "stage", "tensor", "kind", "where", "recovered by", "outcome")
_QUANTIZATION = ("load_in_4bit", "load_in_8bit")
_QUANTIZATION_4BIT = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")
_DTYPES = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """The content of a card."""

    name: str  # title of the card
    base_model: str  # name or path, as it was given
    trained: Trained
    verb: str = "sft"
    base_model_id: str | None = None  # its id on the Hub, given by the user for a local directory
    revision: str | None = None  # of the base model
    datasets: Sequence[str] = ()  # names or paths, as they were given
    data: str = ""  # one line about the rows
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, by name
    rows: Sequence[Row] = ()  # the log history
    step: int = 0  # optimizer steps done
    final: bool = True  # False for a checkpoint in the middle of the run
    report: Mapping[str, Any] = field(default_factory=dict)  # the transfer report
    picture: str | None = None  # file name of the picture of the loss
    repo_id: str | None = None  # of the adapter on the Hub, if known

    @property
    def is_adapter(self) -> bool:
        """Whether the base model is needed to use what was trained."""
        return self.trained.adapter_dtype is not None


def build(facts: CardFacts, private: Private) -> str:
    """The whole card, with metadata and hash."""
    base_id = published_name(facts.base_model, private, facts.base_model_id)
    ids = [published_name(name, private) for name in facts.datasets]
    clean = replace(
        facts,
        name=" ".join(scrub_text(facts.name, private).split()) or "model",
        base_model=base_id or Path(scrub_text(facts.base_model, private)).name,
        base_model_id=base_id,
        datasets=tuple(dict.fromkeys(name for name in ids if name)),
        data=scrub_text(facts.data, private),
        settings=scrub_json(facts.settings, private),
        report=scrub_json(facts.report, private),
    )
    whole = f"---\n{_metadata(clean)}\n---\n\n{_text(clean)}"
    signed = whole.encode("utf-8", "replace").decode().rstrip()
    return (
        f"{signed}\n\n<!-- hf-rocm-tune wrote this card ({_digest(signed)}); a card that was edited is kept, "
        "one that was not is replaced when training goes on -->\n"
    )


def is_ours(text: str) -> bool:
    """Whether a card was written by `build` and not changed since."""
    found = _SIGNED.match(text)
    return found is not None and found["sha256"] == _digest(found["text"])


def kept(file: Path) -> bytes | None:
    """The bytes of a ``README.md`` that a person wrote or edited; None if there is none or it is ours."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    return None if is_ours(content.decode("utf-8", "replace")) else content


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _metadata(facts: CardFacts) -> str:
    """The YAML block. Licence and language are left out: they are the base model's and the data's."""
    tags = ["transformers", "trl", facts.verb, "hf-rocm-tune", "generated_from_trainer"]
    more: dict[str, Any] = {}
    if facts.is_adapter:
        tags.append("lora")
    if facts.base_model_id:
        more["base_model"] = facts.base_model_id
        more["base_model_relation"] = "adapter" if facts.is_adapter else "finetune"
        tags += [f"base_model:adapter:{facts.base_model_id}"] if facts.is_adapter else []
    if facts.datasets:
        more["datasets"] = list(facts.datasets)
    if facts.trained.model_class.endswith("ForCausalLM"):
        more["pipeline_tag"] = "text-generation"
    library = "peft" if facts.is_adapter else "transformers"
    return str(ModelCardData(library_name=library, tags=sorted(tags), **more).to_yaml())


# ---- the text -------------------------------------------------------------------------------------------------------


def _prose(value: str) -> str:
    """A foreign text, escaped for Markdown, in one line."""
    return _ACTIVE.sub(r"\\\1", " ".join(value.split()))


def _code(value: str) -> str:
    """A foreign value as code, also within a table."""
    return f"`{' '.join(value.split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`" if value.strip() else ""


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table, whose cells are Markdown already, and an empty line; nothing without lines."""
    rows = [f"| {' | '.join(line)} |" for line in lines]
    head = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*head, *rows, ""]) if rows else ""


def _text(facts: CardFacts) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_rocm_tune.publish", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": _prose, "code": _code, "quoted": json.dumps}
    trained, report = facts.trained, facts.report
    base = _prose(facts.base_model)
    if facts.base_model_id:
        base = f"[{base}](https://huggingface.co/{facts.base_model_id})"
    what = f"An adapter ({_prose(trained.method)}) for {base}" if facts.is_adapter else f"{base}, fine-tuned in full"
    done = f"{facts.step:,} steps" if facts.final else f"{facts.step:,} steps so far (a checkpoint, not the result)"
    auto = "AutoModelForCausalLM" if trained.model_class.endswith("ForCausalLM") else trained.model_class
    return environment.get_template("card.md.j2").render(
        f=facts,
        history=history,
        report=report,
        about=f"{what}, trained with [TRL](https://huggingface.co/docs/trl)'s SFT trainer under hf-rocm-tune, which "
        f"verifies every transfer to the device: {done}, {trained.trainable:,} of {trained.parameters:,} parameters.",
        verdict=history.judge(report, finished=facts.final),
        auto=auto,
        imports=", ".join(
            sorted({auto, "AutoTokenizer"} | ({"BitsAndBytesConfig"} if trained.quantization else set()))
        ),
        arguments=_arguments(facts),
        kept_dtype=facts.is_adapter and trained.adapter_dtype != "float32",
        settings=[(name, _code(plain(value))) for name, value in history.shown_settings(facts.settings).items()],
        integrity=[(name, _prose(value)) for name, value in history.integrity(report)],
        incident_names=_INCIDENT_COLUMNS,
        incidents=[
            [_code(history.incident(row)[name]) for name in _INCIDENT_COLUMNS] for row in items(report, "incidents")
        ],
        machine=_machine(report),
        rows=_table,
    )


def _machine(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = [(_prose(name), _code(value)) for name, value in history.device(report)]
    return lines + [(_prose(name), _code(plain(value))) for name, value in table(report, "versions").items() if value]


# ---- the code that loads it -----------------------------------------------------------------------------------------


def _arguments(facts: CardFacts) -> list[str]:
    trained, settings = facts.trained, facts.settings
    arguments = ["base_model" if facts.is_adapter else "trained"]
    if facts.is_adapter and facts.base_model_id and facts.revision not in (None, "main"):
        arguments.append(f"revision={json.dumps(facts.revision)}")
    arguments.append(f"dtype={_dtype(trained.dtype)}")
    if config := trained.quantization:
        names = [*_QUANTIZATION, *(_QUANTIZATION_4BIT if config.get("load_in_4bit") else ())]
        given = {name: config[name] for name in names if config.get(name) not in (None, False)}
        inner = "".join(f"        {name}={_literal(name, value)},\n" for name, value in given.items())
        arguments.append(f"quantization_config=BitsAndBytesConfig(\n{inner}    )")
    if attention := text(settings, "attn_implementation"):
        arguments.append(f"attn_implementation={json.dumps(attention)}")
    if settings.get("trust_remote_code") is True:
        arguments.append("trust_remote_code=True")
    return [*arguments, "device_map=device"]


def _literal(name: str, value: Any) -> str:
    if name.endswith("dtype"):
        return _dtype(str(value))
    return "True" if value is True else json.dumps(str(value))


def _dtype(name: str) -> str:
    """A dtype as code; "auto" for one that is not a dtype of weights."""
    bare = name.removeprefix("torch.")
    return f"torch.{bare}" if bare in _DTYPES else '"auto"'


# ---- a card that a person may have edited, before it is published ----------------------------------------------------

# The Hub's own, from huggingface_hub.repocard.
_FRONT_MATTER = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(\r\n|\n|$))")


def published_name(name: str, private: Private, base_model_id: str | None = None) -> str | None:
    """The public id of a model or dataset on the Hub; None if there is none.

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
    """A card that the Hub accepts, without private paths and secrets.

    The Hub answers 400 to a card whose ``base_model`` or ``datasets`` is not an id of the Hub, so a local path there is
    replaced by the id that the user gave, or removed.

    Returns:
        The text (the same object if nothing was changed), and the changes in words without private content.

    Raises:
        UsageError: the metadata is not a YAML mapping, or huggingface_hub cannot read it.
    """
    found = _FRONT_MATTER.match(text)
    front, body = ("", text) if found is None else (found[0], text[found.end() :])
    changes: list[str] = []
    try:
        if found is not None:
            metadata = yaml.safe_load(found[2]) or {}
            if not isinstance(metadata, dict):
                raise ValueError("not a YAML mapping")
            cleaned = _clean_metadata(metadata, private, base_model_id, changes)
            if cleaned != metadata:
                front = f"---\n{yaml.safe_dump(cleaned, sort_keys=False, allow_unicode=True)}---\n"
        cleaned_body = scrub_text(body, private, names=False)
        if cleaned_body != body:
            changes.append("local paths or secrets in its text were replaced")
        result = front + cleaned_body if changes else text
        ModelCard(result)  # huggingface_hub's own reading; the Hub's is asked for when the card is uploaded
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        message = " ".join(str(error).split())
        raise UsageError(
            f"the metadata of README.md cannot be read ({message}): correct the lines between the --- marks"
        ) from error
    return result, changes


def _clean_metadata(
    metadata: dict[str, Any], private: Private, base_model_id: str | None, changes: list[str]
) -> dict[str, Any]:
    """The metadata with ids of the Hub only; appends what was changed."""
    cleaned: dict[str, Any] = {}
    for key, value in metadata.items():
        if key in ("base_model", "datasets"):
            given = base_model_id if key == "base_model" else None
            names = value if isinstance(value, list) else [value]
            found = (published_name(str(name), private, given) for name in names if name is not None)
            ids = list(dict.fromkeys(filter(None, found)))
            if ids:
                cleaned[key] = ids if isinstance(value, list) else ids[0]
            if ids != names:
                changes.append(f"{key}: {', '.join(ids) or 'removed, it was a local path'}")
            continue
        kept = value
        if key == "tags" and isinstance(value, list):  # base_model:adapter:NAME; the Hub makes its own of `base_model`
            kept = [tag for tag in value if ":" not in str(tag) or not private.is_local(str(tag).rpartition(":")[2])]
        cleaned[key] = scrub_json(kept, private, names=False)
        if cleaned[key] != value:
            changes.append(f"{key}: without local paths")
    if base_model_id and "base_model" not in cleaned:
        cleaned["base_model"] = base_model_id
        changes.append(f"base_model: {base_model_id}")
    return cleaned
