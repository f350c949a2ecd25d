"""The model card, ``README.md``, from the template ``card.md.j2``.

Foreign values are redacted and escaped for Markdown. A card ends with the hash of its text: one with a correct hash is
ours and is replaced by the next one; any other ``README.md`` was written or edited by a person and is kept.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
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
from hf_rocm_tune.publish.history import Row, Trained, plain
from hf_rocm_tune.redaction import Private, hub_id_of, scrub_json, scrub_text

CARD_NAME = "README.md"
_SIGNED = re.compile(
    r"\A(?P<text>.*)\n\n<!-- hf-rocm-tune wrote this card \((?P<sha256>[0-9a-f]{64})\)[^\n]*-->\s*\Z", re.S
)
_ACTIVE = re.compile(r"([\\`*_\[\]<>|#~$])")
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
    columns: Sequence[str] = ()  # of the rows, as the trainer reads them
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

    @property
    def gives_scores(self) -> bool:
        """Whether it is a reward model."""
        return self.trained.model_class.endswith("ForSequenceClassification")


def build(facts: CardFacts, private: Private) -> str:
    """The whole card, with metadata and hash."""
    base_id = published_name(facts.base_model, private, facts.base_model_id)
    ids = [published_name(name, private) for name in facts.datasets]
    told = {name: scrub_json(getattr(facts, name), private) for name in ("data", "settings", "report")}
    told["name"] = " ".join(scrub_text(facts.name, private).split()) or "model"
    told["base_model"] = base_id or Path(scrub_text(facts.base_model, private)).name
    clean = replace(facts, base_model_id=base_id, datasets=tuple(dict.fromkeys(filter(None, ids))), **told)
    whole = f"---\n{_metadata(clean)}\n---\n\n{_text(clean)}"
    signed = whole.encode("utf-8", "replace").decode().rstrip()
    return (
        f"{signed}\n\n<!-- hf-rocm-tune wrote this card ({_digest(signed)}); a card that was edited is kept, "
        "one that was not is replaced when training goes on -->\n"
    )


def kept(file: Path) -> bytes | None:
    """The bytes of a ``README.md`` that a person wrote or edited; None if there is none or it is ours."""
    content = file.read_bytes() if file.exists() else None
    return None if content is None or is_ours(content.decode("utf-8", "replace")) else content


def is_ours(text: str) -> bool:
    """Whether a card was written by `build` and not changed since."""
    found = _SIGNED.match(text)
    return found is not None and found["sha256"] == _digest(found["text"])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _metadata(facts: CardFacts) -> str:
    """The YAML block. Licence and language are left out: they are the base model's and the data's."""
    tags = ["transformers", "trl", facts.verb, "hf-rocm-tune", "generated_from_trainer"]
    more: dict[str, Any] = {"library_name": "peft" if facts.is_adapter else "transformers"}
    tags += ["lora"] if facts.is_adapter else []
    if facts.base_model_id:
        more["base_model"] = facts.base_model_id
        more["base_model_relation"] = "adapter" if facts.is_adapter else "finetune"
        tags += [f"base_model:adapter:{facts.base_model_id}"] if facts.is_adapter else []
    if facts.datasets:
        more["datasets"] = list(facts.datasets)
    if facts.gives_scores or facts.trained.model_class.endswith("ForCausalLM"):
        more["pipeline_tag"] = "text-classification" if facts.gives_scores else "text-generation"
    return str(ModelCardData(tags=sorted(tags), **more).to_yaml())


# ---- the text -------------------------------------------------------------------------------------------------------


def _prose(value: str) -> str:
    """A foreign text, escaped for Markdown, in one line."""
    return _ACTIVE.sub(r"\\\1", " ".join(value.split()))


def _code(value: str) -> str:
    """A foreign value as code, also within a table."""
    return f"`{' '.join(value.split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`" if value.strip() else ""


@functools.cache
def template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_rocm_tune.publish", ""),
        autoescape=False,  # Markdown: each foreign value passes one of the filters
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": _prose, "code": _code, "json": json.dumps, "dtype": _dtype, "plain": plain}
    return environment.get_template("card.md.j2")


def _text(facts: CardFacts) -> str:
    """The template ``card.md.j2``, without the empty lines of what is left out."""
    trained, report, config = facts.trained, facts.report, facts.trained.quantization or {}
    auto = "AutoModelForCausalLM" if trained.model_class.endswith("ForCausalLM") else trained.model_class
    auto = "AutoModelForSequenceClassification" if facts.gives_scores else auto
    wanted = [name for name in config if config.get("load_in_4bit") or not name.startswith("bnb_4bit_")]
    given = [(name, _literal(name, config[name])) for name in wanted if config[name] not in (None, False)]
    text = template().render(
        facts=facts,
        trained=trained,
        auto=auto,
        imports=", ".join(sorted({auto, "AutoTokenizer"} | ({"BitsAndBytesConfig"} if given else set()))),
        quantization=given,
        keeps_dtype=facts.is_adapter and trained.adapter_dtype != "float32",
        history=history,
        trainer="RewardTrainer" if facts.verb == "reward" else f"{facts.verb.upper()}Trainer",
        verdict=history.judge(report, finished=facts.final),
        data=[history.data_row(row) for row in history.items(report, "data")],
        machine=[*history.device(report), *history.mapping(report, "versions").items()],
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _literal(name: str, value: Any) -> str:
    return _dtype(str(value)) if name.endswith("dtype") else "True" if value is True else json.dumps(str(value))


def _dtype(name: str) -> str:
    """A dtype as code; "auto" for one that is not a dtype of weights."""
    bare = name.removeprefix("torch.")
    return f"torch.{bare}" if bare in _DTYPES else '"auto"'


# ---- a card that a person may have edited, before it is published ----------------------------------------------------


def published_name(name: str, private: Private, base_model_id: str | None = None) -> str | None:
    """The public id of a model or dataset on the Hub, or of a path in the Hub's cache; None if there is none."""
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


def clean_card(text: str, private: Private, *, base_model_id: str | None = None) -> str:
    """A card without private paths and secrets, whose ``base_model`` and ``datasets`` are ids, as the Hub demands."""
    try:
        card = ModelCard(text, ignore_metadata_errors=False)
        before = card.data.to_dict()
        given = {"base_model": base_model_id} if base_model_id and before else {}
        cleaned = {key: _cleaned(key, value, private, base_model_id) for key, value in {**given, **before}.items()}
        cleaned = {key: value for key, value in cleaned.items() if value}
        front = text[: len(text) - len(card.text)]
        if cleaned != before:
            front = f"---\n{yaml.safe_dump(cleaned, sort_keys=False, allow_unicode=True)}---\n"
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"the metadata of README.md between the --- marks cannot be read: {error}") from error
    return front + scrub_text(card.text, private, names=False)


def _cleaned(key: str, value: Any, private: Private, base_model_id: str | None) -> Any:
    if key in ("base_model", "datasets"):
        names = [str(name) for name in (value if isinstance(value, list) else [value]) if name is not None]
        ids = [published_name(name, private, base_model_id if key == "base_model" else None) for name in names]
        public = list(dict.fromkeys(filter(None, ids)))
        return public if isinstance(value, list) else next(iter(public), None)
    if key == "tags" and isinstance(value, list):  # base_model:adapter:NAME
        return [tag for tag in value if ":" not in str(tag) or not private.is_local(str(tag).rpartition(":")[2])]
    return scrub_json(value, private, names=False)
