"""The model card, ``README.md``: trainer, base model, data, settings, code that loads the result, how it was verified.

Foreign values (names of files, settings, texts of incidents) are redacted and escaped for Markdown. ``base_model`` and
``datasets`` are ids of the Hub or left out, as the Hub demands. The code loads the result with the arguments that give
the outputs of training: TRL trains adapters of quantised models in bfloat16, which PEFT would load as float32; and
``device_map="auto"`` would split the base over two cards, with copies between them.

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

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish import history
from hf_rocm_tune.publish.history import Row, Trained, count, items, plain, table, text
from hf_rocm_tune.redaction import Private, hub_id_of, scrub_json, scrub_text

CARD_NAME = "README.md"
_SIGNED = re.compile(
    r"\A(?P<text>.*)\n\n<!-- hf-rocm-tune wrote this card \((?P<sha256>[0-9a-f]{64})\)[^\n]*-->\s*\Z", re.S
)
_ACTIVE = re.compile(r"([\\`*_\[\]<>|#~$])")
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
    if facts.gives_scores or facts.trained.model_class.endswith("ForCausalLM"):
        more["pipeline_tag"] = "text-classification" if facts.gives_scores else "text-generation"
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
    """A table, whose cells are Markdown already; nothing without lines."""
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *rows]) if rows else ""


def _text(facts: CardFacts) -> str:
    trained, report = facts.trained, facts.report
    base = _prose(facts.base_model)
    if facts.base_model_id:
        base = f"[{base}](https://huggingface.co/{facts.base_model_id})"
    kind = "reward model, which scores a text, " if facts.gives_scores else ""
    what = f"{base}, fine-tuned in full"
    if facts.is_adapter:
        what = f"An adapter ({_prose(trained.method)}) that makes {base} a {kind}" if kind else f"An adapter for {base}"
    trainer = "RewardTrainer" if facts.verb == "reward" else f"{facts.verb.upper()}Trainer"
    done = f"{facts.step:,} steps" if facts.final else f"{facts.step:,} steps so far (a checkpoint, not the result)"
    verdict = history.judge(report, finished=facts.final)
    links = [f"[{_prose(name)}](https://huggingface.co/datasets/{name})" for name in facts.datasets]
    columns = f"; columns {', '.join(map(_code, facts.columns))}" if facts.columns else ""
    dtypes = ", which keeps the adapter in the dtype of its training" if _keeps_dtype(facts) else ""
    settings = [(name, _code(plain(value))) for name, value in history.shown_settings(facts.settings).items()]
    machine = [*history.device(report), *((n, plain(v)) for n, v in table(report, "versions").items() if v)]
    parts = [
        f"# {_prose(facts.name)}",
        f"{what.rstrip(', ')}, trained with [TRL](https://huggingface.co/docs/trl)'s `{trainer}` under hf-rocm-tune, "
        f"which verifies every transfer to the device: {done}, {trained.trainable:,} of {trained.parameters:,} "
        "parameters.",
        f"**Integrity:** {_prose(verdict.headline)}",
        "## How to load it",
        f"```python\n{_loading(facts)}\n```",
        f"These arguments give the outputs of the training{dtypes}.",
        f"```python\n{_using(facts)}\n```",
        "## Training",
        f"![Loss over optimizer steps]({facts.picture})" if facts.picture else "",
        _table(("", ""), history.figures(facts.rows)),
        f"Method: {_prose(trained.method)}. Data: {_prose(facts.data)}{columns}."
        + (f" On the Hub: {', '.join(links)}." if links else ""),
        *_data(report),
        _table(("setting", "value"), settings),
        "## Integrity",
        history.explained(report) if report else "There is no transfer report, so it is unknown what was verified.",
        "\n".join(f"- {_prose(note)}" for note in verdict.notes),
        _table(("what was checked", "how much", "wrong", "recovered"), [row.cells for row in history.counted(report)]),
        "\n".join(f"- {name}: {_prose(value)}" for name, value in history.events(report)),
        "`transfer_report.json` has each incident; `integrity.json` has the hashes of all files." if report else "",
        _table(("", ""), [(_prose(name), _code(value)) for name, value in machine]),
        "This card was written by the program that trained the model: intended uses, limits, the licence (the base "
        "model's and the data's count) and evaluations are for its authors to add. A card that was edited is kept.",
    ]
    return "\n\n".join(filter(None, parts))


def _data(report: Mapping[str, Any]) -> list[str]:
    """What was cut off and dropped, and the share that counts in the loss."""
    lines = []
    for row in items(report, "data"):
        tokens = max(count(row, "kept"), 1)
        lines.append(
            f"- {_prose(text(row, 'split'))}: {count(row, 'rows'):,} rows, {count(row, 'tokens'):,} tokens; "
            f"{count(row, 'cut'):,} rows cut ({count(row, 'lost'):,} tokens lost), {count(row, 'dropped'):,} rows "
            f"dropped; {100 * count(row, 'trained') / tokens:.3g} % of the tokens count in the loss"
        )
    return ["\n".join(lines)]


# ---- its code -------------------------------------------------------------------------------------------------------


def _keeps_dtype(facts: CardFacts) -> bool:
    return facts.is_adapter and facts.trained.adapter_dtype != "float32"


def _loading(facts: CardFacts) -> str:
    trained, name = facts.trained, "adapter" if facts.is_adapter else "trained"
    auto = "AutoModelForCausalLM" if trained.model_class.endswith("ForCausalLM") else trained.model_class
    auto = "AutoModelForSequenceClassification" if facts.gives_scores else auto
    imports = sorted({auto, "AutoTokenizer"} | ({"BitsAndBytesConfig"} if trained.quantization else set()))
    lines = ["import torch"]
    lines += ["from peft import PeftModel"] if facts.is_adapter else []
    lines += [f"from transformers import {', '.join(imports)}", ""]
    if facts.is_adapter:
        if not facts.base_model_id:
            lines.append("# It was loaded from a directory of this name: give its path here, or its id on the Hub.")
        lines.append(f"base_model = {json.dumps(facts.base_model)}")
    here = "" if facts.repo_id else "  # this directory, or its id on the Hub"
    lines += [f"{name} = {json.dumps(facts.repo_id or '.')}{here}", ""]
    lines += ['device = "cuda" if torch.cuda.is_available() else "cpu"  # torch calls ROCm cards "cuda" as well', ""]
    lines += [f"tokenizer = AutoTokenizer.from_pretrained({name})", f"model = {auto}.from_pretrained("]
    lines += [*(f"    {argument}," for argument in _arguments(facts)), ")"]
    if facts.is_adapter:
        keep = ", autocast_adapter_dtype=False" if _keeps_dtype(facts) else ""
        lines.append(f"model = PeftModel.from_pretrained(model, adapter{keep})")
    return "\n".join([*lines, "model.eval()"])


def _using(facts: CardFacts) -> str:
    messages = [{"role": "user", "content": "What is a checksum?"}]
    if facts.gives_scores:
        messages.append({"role": "assistant", "content": "A small number that changes when the data do."})
    if facts.trained.chat_template:
        wanted = "" if facts.gives_scores else "add_generation_prompt=True, "
        lines = [
            f"messages = {json.dumps(messages)}",
            "inputs = tokenizer.apply_chat_template(",
            f'    messages, {wanted}return_dict=True, return_tensors="pt"',
            ").to(device)",
        ]
    else:
        text = "A checksum is" + (" a small number that changes when the data do." if facts.gives_scores else "")
        lines = [f'inputs = tokenizer("{text}", return_tensors="pt").to(device)']
    if facts.gives_scores:
        lines += ["with torch.no_grad():", "    score = model(**inputs).logits[0, 0].item()  # higher is better"]
        return "\n".join([*lines, "print(score)"])
    lines += ["generated = model.generate(**inputs, max_new_tokens=64)"]
    answer = 'generated[0, inputs["input_ids"].shape[1] :]'
    return "\n".join([*lines, f"print(tokenizer.decode({answer}, skip_special_tokens=True))"])


def _arguments(facts: CardFacts) -> list[str]:
    trained, settings = facts.trained, facts.settings
    arguments = ["base_model" if facts.is_adapter else "trained"]
    if facts.is_adapter and facts.base_model_id and facts.revision not in (None, "main"):
        arguments.append(f"revision={json.dumps(facts.revision)}")
    arguments += ["num_labels=1"] if facts.gives_scores and facts.is_adapter else []
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
        private: which names are paths.
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
    """A card that the Hub accepts, without private paths and secrets, and what was changed, in public words.

    The Hub answers 400 to a card whose ``base_model`` or ``datasets`` is not an id of the Hub, so a local path there is
    replaced by the id that the user gave, or removed. Metadata that cannot be read is a ``UsageError``.
    """
    found = _FRONT_MATTER.match(text)
    front, body = ("", text) if found is None else (found[0], text[found.end() :])
    changes: list[str] = []
    try:
        metadata = (yaml.safe_load(found[2]) or {}) if found is not None else {}
        if not isinstance(metadata, dict):
            raise ValueError("not a YAML mapping")
        cleaned = {**metadata}
        if base_model_id and found is not None:
            cleaned.setdefault("base_model", base_model_id)
        for key, value in list(cleaned.items()):
            if key in ("base_model", "datasets"):
                given = base_model_id if key == "base_model" else None
                names = value if isinstance(value, list) else [value]
                ids = [published_name(str(name), private, given) for name in names if name is not None]
                public = list(dict.fromkeys(filter(None, ids)))
                cleaned[key] = public if isinstance(value, list) else public[0] if public else None
            elif key == "tags" and isinstance(value, list):  # base_model:adapter:NAME
                cleaned[key] = [
                    tag for tag in value if ":" not in str(tag) or not private.is_local(str(tag).rpartition(":")[2])
                ]
            else:
                cleaned[key] = scrub_json(value, private, names=False)
            if not cleaned[key]:
                del cleaned[key]
        for key in [*metadata, *(key for key in cleaned if key not in metadata)]:
            if cleaned.get(key) != metadata.get(key):
                changes.append(f"{key}: {plain(cleaned[key]) if key in cleaned else 'removed, it was a local path'}")
        if changes:
            front = f"---\n{yaml.safe_dump(cleaned, sort_keys=False, allow_unicode=True)}---\n"
        public_body = scrub_text(body, private, names=False)
        if public_body != body:
            changes.append("local paths or secrets in its text were replaced")
        result = front + public_body if changes else text
        ModelCard(result)  # huggingface_hub's own reading; the Hub's is asked for when the card is uploaded
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        message = " ".join(str(error).split())
        raise UsageError(
            f"the metadata of README.md cannot be read ({message}): correct the lines between the --- marks"
        ) from error
    return result, changes
