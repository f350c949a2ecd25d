"""The text of a model card, section by section, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hf_rocm_tune.publish.card_settings import chosen
from hf_rocm_tune.publish.card_snippet import generating, loading
from hf_rocm_tune.publish.history import last, training_seconds
from hf_rocm_tune.publish.history_values import count, duration, items, number, plain, size, table, text
from hf_rocm_tune.publish.history_verdict import counted, coverage, explained, incident, judge, unverified

if TYPE_CHECKING:
    from hf_rocm_tune.publish.card import CardFacts

_MOST_INCIDENTS = 10
_MOST_FINDINGS = 8
_ACTIVE = re.compile(r"([\\`*_\[\]<>|#~$])")


def sections(facts: CardFacts) -> list[str]:
    """Each section as a block of lines."""
    return [
        *_head(facts),
        *_load(facts),
        *_results(facts),
        *_training(facts),
        *_integrity(facts),
        *_events(facts),
        *_machine(facts),
        _unknown(),
    ]


def prose(value: str) -> str:
    """A foreign text as Markdown that shows just it, in one line."""
    return _ACTIVE.sub(r"\\\1", " ".join(value.split()))


def code(value: str) -> str:
    """A foreign value as code, also within a table."""
    return f"`{' '.join(value.split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`" if value.strip() else ""


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; the cells are Markdown already."""
    made = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*made, *(f"| {' | '.join(line)} |" for line in lines)])


def _head(facts: CardFacts) -> list[str]:
    trained = facts.trained
    base = prose(facts.base_model)
    if facts.base_model_id:
        base = f"[{base}](https://huggingface.co/{facts.base_model_id})"
    what = f"An adapter ({prose(trained.method)}) for {base}" if facts.is_adapter else f"{base}, fine-tuned in full"
    done = f"{facts.step:,} steps" if facts.final else f"{facts.step:,} steps so far (a checkpoint, not the result)"
    about = (
        f"{what}, trained with [TRL](https://huggingface.co/docs/trl)'s SFT trainer under hf-rocm-tune, which verifies "
        f"every transfer to the device: {done}, {trained.trainable:,} of {trained.parameters:,} parameters."
    )
    verdict = judge(facts.report, finished=facts.final)
    return [f"# {prose(facts.name)}", about, f"**Integrity:** {prose(verdict.headline)}"]


def _load(facts: CardFacts) -> list[str]:
    note = "These arguments give the logits of the training."
    if facts.is_adapter and facts.trained.adapter_dtype != "float32":
        note += (
            f" `autocast_adapter_dtype=False` keeps the adapter in {code(str(facts.trained.adapter_dtype))}, in "
            "which it was trained; PEFT would load it as float32."
        )
    if facts.trained.quantization:
        note += " The base model is quantised as it was in the training."
    fenced = [f"```python\n{block}\n```" for block in (loading(facts), generating(facts))]
    return ["## How to load it", fenced[0], note, fenced[1]]


def _results(facts: CardFacts) -> list[str]:
    figures = {
        "training loss, last": last(facts.rows, "loss"),
        "evaluation loss, last": last(facts.rows, "eval_loss"),
        "evaluation, mean token accuracy": last(facts.rows, "eval_mean_token_accuracy"),
        "epochs": last(facts.rows, "epoch"),
        "tokens": last(facts.rows, "num_tokens"),
    }
    lines = [(name, f"{value:,.6g}") for name, value in figures.items() if value is not None]
    if seconds := training_seconds(facts.rows):
        lines.append(("time of all steps", duration(seconds)))
    found = ["## Results"]
    if facts.picture:
        found.append(f"![Loss over optimizer steps]({facts.picture})")
    if lines:
        found.append(rows(("", ""), lines))
    return found if len(found) > 1 else []


def _training(facts: CardFacts) -> list[str]:
    data = f"Data: {prose(facts.data)}." if facts.data else ""
    links = [f"[{prose(name)}](https://huggingface.co/datasets/{name})" for name in facts.datasets]
    if links:
        data += f" On the Hub: {', '.join(links)}."
    lines = [(name, code(plain(value))) for name, value in chosen(facts.settings).items()]
    method = f"Method: {prose(facts.trained.method)}."
    return [
        "## Training",
        " ".join(filter(None, (method, data))),
        *([rows(("setting", "value"), lines)] if lines else []),
    ]


def _integrity(facts: CardFacts) -> list[str]:
    report = facts.report
    if not report:
        return ["## Integrity", "There is no transfer report, so nothing is known of what was verified."]
    verdict = judge(report, finished=facts.final)
    share = coverage(report)
    nbytes = number(report, "coverage", "verified_bytes") or 0.0
    about = [
        f"Verification: {code(text(report, 'verify') or 'unknown')}.",
        f"Coverage: {share:g} % of the bytes on the device, {size(nbytes)}." if share is not None else "",
        explained(report),
        "" if facts.final or count(report, "ranks") < 2 else "The counters so far are those of the first process.",
    ]
    found = ["## Integrity", prose(verdict.headline), " ".join(filter(None, about))]
    found += [f"- {prose(note)}" for note in verdict.notes]
    lines = [
        (row.what, row.amount, f"{row.mismatches:,}", "" if row.recovered is None else f"{row.recovered:,}")
        for row in counted(report)
    ]
    if lines:
        found.append(rows(("what was checked", "how much", "wrong", "made right"), lines))
    if names := unverified(report):
        shown = "; ".join(f"{code(name)} ({prose(why)})" for name, why in names[:5])
        found.append(f"Not verified: {shown}{f' and {len(names) - 5} more' if len(names) > 5 else ''}.")
    found += _incidents(items(report, "incidents"))
    found.append("The full report is in `transfer_report.json`, hashes of all files are in `integrity.json`.")
    return found


def _incidents(incidents: Sequence[object]) -> list[str]:
    if not incidents:
        return []
    names = ("step", "stage", "tensor", "kind", "where", "made right by", "outcome")
    lines = [[code(incident(row)[name]) for name in names] for row in incidents[:_MOST_INCIDENTS]]
    more = len(incidents) - _MOST_INCIDENTS
    end = [f"{more:,} more are in the report."] if more > 0 else []
    return ["### Incidents", rows(names, lines), *end]


def _events(facts: CardFacts) -> list[str]:
    """What the run lived through, in brief; nothing where nothing happened."""
    report = facts.report
    restarts = max(0, count(report, "survival", "starts") - 1)
    skipped = items(report, "survival", "skipped_steps")
    cut = count(report, "memory", "micro_batch_divisor")
    said = [
        f"- The run was started again {restarts} time{'s' if restarts > 1 else ''} by its supervisor."
        if restarts
        else "",
        f"- Left out, because the run died in them: steps {prose(plain(skipped))}." if skipped else "",
        f"- Micro-batches were cut into up to {cut} parts for want of memory." if cut > 1 else "",
        f"- {count(report, 'guard', 'skipped_steps')} steps were not used because they were not finite."
        if count(report, "guard", "skipped_steps")
        else "",
    ]
    told = [row for row in items(report, "findings") if text(row, "status") in ("warn", "fail")]
    for row in told[:_MOST_FINDINGS]:
        said.append(f"- The machine, {text(row, 'status')}: {prose(text(row, 'title'))}: {prose(text(row, 'text'))}")
    said = [line for line in said if line]
    return ["## What the run met with", "\n".join(said)] if said else []


def _machine(facts: CardFacts) -> list[str]:
    device = table(facts.report, "device")
    lines = []
    if device:
        memory = number(device, "memory_bytes")
        told = [text(device, "name"), text(device, "arch"), f"{memory / 2**30:.1f} GiB" if memory else ""]
        ranks = count(facts.report, "ranks")
        lines.append(("device", code(", ".join(filter(None, told)) or text(device, "type"))))
        lines.append(("processes", f"{ranks}"))
    for seen in items(facts.report, "telemetry"):
        hot, power = number(seen, "hotspot_c", "max"), number(seen, "power_w", "mean")
        peak = number(seen, "torch_peak_allocated_gib")
        figures = [
            f"peak of {peak:.1f} GiB allocated" if peak is not None else "",
            f"{power:.0f} W on average" if power is not None else "",
            f"hotspot up to {hot:.0f} degrees Celsius" if hot is not None else "",
        ]
        if any(figures):
            lines.append((f"card of rank {count(seen, 'rank')}", ", ".join(filter(None, figures))))
    lines += [(prose(name), code(plain(value))) for name, value in table(facts.report, "versions").items() if value]
    return ["## Hardware and software", rows(("", ""), lines)] if lines else []


def _unknown() -> str:
    return (
        "## Not said here\n\nThis card was written by the program that trained the model. It knows how the model was "
        "made, and not what it is for: intended uses, limits, the licence (the base model's and the data's count) and "
        "an evaluation beyond the loss are for its authors to add. A card that was edited is kept."
    )
