"""The model card, ``README.md``: what was trained, on what, how it is loaded, and how it was verified.

The card is made of plain values, so that whoever trains need not be imported here; its text is the template
``card.md.j2``. Values that this program did not choose (names of files, settings, texts of incidents) are redacted and
written as text, never as Markdown. The card is valid for the Hub: ``base_model`` and ``datasets`` are ids of the Hub or
not there. Its code loads what was trained with the arguments that give the logits of the training: TRL trains the
adapters of quantised models in bfloat16, while PEFT loads every adapter as float32 unless it is told not to; and
``device_map="auto"`` would split the base over two cards by copies between them.

A card ends with the hash of its own text. One whose hash is still right is ours and is replaced by the next; any other
``README.md`` has been written or edited by a person and is kept.
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
from huggingface_hub import EvalResult, ModelCardData

from hf_rocm_tune.publish import history
from hf_rocm_tune.publish.history import Row, Trained, count, items, last, number, plain, table, text
from hf_rocm_tune.publish.staging import CARD_NAME, published_name
from hf_rocm_tune.redaction import Private, scrub_json, scrub_text

__all__ = ["CARD_NAME", "CardFacts", "build", "is_ours", "kept"]

_SIGNED = re.compile(
    r"\A(?P<text>.*)\n\n<!-- hf-rocm-tune wrote this card \((?P<sha256>[0-9a-f]{64})\)[^\n]*-->\s*\Z", re.S
)
_ACTIVE = re.compile(r"([\\`*_\[\]<>|#~$])")
_MOST_FINDINGS = 8
_INCIDENT_COLUMNS = ("step", "stage", "tensor", "kind", "where", "recovered by", "outcome")
_QUANTIZATION = ("load_in_4bit", "load_in_8bit")
_QUANTIZATION_4BIT = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")
_DTYPES = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Everything that a card says.

    Args:
        name: title of the card.
        base_model: name or path of the base model, as it was given.
        base_model_id: its id on the Hub, where it was loaded from a directory and the user has said so.
        revision: of the base model; None for the default.
        datasets: names or paths, as they were given.
        data: one line about the rows.
        trained: see `Trained`.
        settings: of the run, by name.
        rows: the log history.
        step: optimizer steps done.
        final: False for a checkpoint in the middle of the run.
        report: the transfer report.
        picture: name of the picture of the loss beside the card; None for none.
        repo_id: where the adapter will be on the Hub, if that is known.
        verb: of the training.
    """

    name: str
    base_model: str
    trained: Trained
    verb: str = "sft"
    base_model_id: str | None = None
    revision: str | None = None
    datasets: Sequence[str] = ()
    data: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    step: int = 0
    final: bool = True
    report: Mapping[str, Any] = field(default_factory=dict)
    picture: str | None = None
    repo_id: str | None = None

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
    """Whether a card is one of `build`'s and was not changed since."""
    found = _SIGNED.match(text)
    return found is not None and found["sha256"] == _digest(found["text"])


def kept(file: Path) -> bytes | None:
    """The bytes of a ``README.md`` that a person wrote or edited; None where there is none or it is ours."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    return None if is_ours(content.decode("utf-8", "replace")) else content


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _metadata(facts: CardFacts) -> str:
    """The YAML block, without the ``---`` around it. Names in ``facts`` are those of the Hub, or only to be shown.

    Licence and language are left out: they are the base model's and the data's, which this program does not know.
    """
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
    loss = last(facts.rows, "eval_loss")
    # The data is on the Hub and so has a name there; of other methods the loss is no property of text.
    if loss is not None and len(facts.datasets) == 1 and facts.verb == "sft":
        result = EvalResult(
            task_type="text-generation",
            dataset_type=facts.datasets[0],
            dataset_name=facts.datasets[0],
            dataset_split=text(facts.settings, "dataset_test_split") or None,
            dataset_config=text(facts.settings, "dataset_config") or None,
            metric_type="loss",
            metric_name="Loss",
            metric_value=round(loss, 6),
        )
        more |= {"model_name": facts.name, "eval_results": [result]}
    library = "peft" if facts.is_adapter else "transformers"
    return str(ModelCardData(library_name=library, tags=sorted(tags), **more).to_yaml())


# ---- the text -------------------------------------------------------------------------------------------------------


def _prose(value: str) -> str:
    """A foreign text as Markdown that shows just it, in one line."""
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
    """The template, filled."""
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
        findings=[row for row in items(report, "findings") if text(row, "status") in ("warn", "fail")][:_MOST_FINDINGS],
        machine=_machine(report),
        rows=_table,
    )


def _machine(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = [(_prose(name), _code(value)) for name, value in history.device(report)]
    for seen in items(report, "telemetry"):
        hot, power = number(seen, "hotspot_c", "max"), number(seen, "power_w", "mean")
        peak = number(seen, "torch_peak_allocated_gib")
        figures = [
            f"peak of {peak:.1f} GiB allocated" if peak is not None else "",
            f"{power:.0f} W on average" if power is not None else "",
            f"hotspot up to {hot:.0f} degrees Celsius" if hot is not None else "",
        ]
        if any(figures):
            lines.append((f"card of rank {count(seen, 'rank')}", ", ".join(filter(None, figures))))
    return lines + [(_prose(name), _code(plain(value))) for name, value in table(report, "versions").items() if value]


# ---- the code that loads it -----------------------------------------------------------------------------------------


def _arguments(facts: CardFacts) -> list[str]:
    """Of ``from_pretrained`` of the base model."""
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
    """A dtype as code; one that is no dtype of weights is left to the model's own configuration."""
    bare = name.removeprefix("torch.")
    return f"torch.{bare}" if bare in _DTYPES else '"auto"'
