"""`transfer_report.json`, saved with the adapter: what was moved, what was verified, and what went wrong."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate.utils import gather_object
from transformers.trainer import TRAINER_STATE_NAME

from hf_rocm_tune.errors import UsageError, listed
from hf_rocm_tune.lifecycle.heartbeat import survival
from hf_rocm_tune.models import products
from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.redaction import redact_json
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.survive.run_directory import new_record, read_record, write_record
from hf_rocm_tune.train.telemetry import describe_device
from hf_rocm_tune.transfer import STAGES, TransferReport
from hf_rocm_tune.transfer.digest import device_method, host_method
from hf_rocm_tune.transfer.report import BETWEEN_CARDS, coverage_of, share_words

if TYPE_CHECKING:
    from collections.abc import Collection

    from hf_rocm_tune.models.placement import Coverage
    from hf_rocm_tune.train.telemetry import Telemetry

FILE_NAME = "transfer_report.json"
SCHEMA = 2
"""1: before `coverage` had ``crossed``. A report of it is still read and shown."""
_DISTRIBUTIONS = (
    "hf-rocm-tune", "torch", "transformers", "accelerate", "peft", "trl", "datasets", "bitsandbytes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the report contains besides the counters."""

    run_id: str
    load_seconds: float | None = None  # until all weights are verified; None: not loaded here
    attested_files: int = 0  # model files whose content has its recorded SHA-256
    not_attested: tuple[str, ...] = ()  # names of model files without a recorded SHA-256
    findings: tuple[dict[str, Any], ...] = ()  # of the doctor and the environment policy, on one rank per machine
    telemetry: Telemetry | None = None  # of this process's card; None if the user has turned it off
    auto_fit: Mapping[str, Any] | None = None  # the choice of --auto_fit and the figures behind it
    data: tuple[Mapping[str, Any], ...] = ()  # see `data.summary.DataSummary`
    vocabulary: int | None = None  # rows of the base's token embeddings, before the run added any
    preflight: Mapping[str, Any] | None = None  # how several ranks average gradients, and the evidence


class ReportedTrainer(OwningTrainer, Protocol):
    """What a report asks of its trainer."""

    @property
    def skip_steps(self) -> Collection[int]: ...
    def weight_coverage(self) -> Coverage: ...
    def describe(self) -> dict[str, Any]: ...


def build(trainer: ReportedTrainer, facts: RunFacts, *, gather: bool) -> dict[str, Any]:
    """Build the report; ``gather``: over all ranks (collective), False for this rank only, after a failure."""
    telemetry = None
    if facts.telemetry:
        telemetry = facts.telemetry.summary()
    of_all_ranks = [(trainer.transfer_report.to_dict(), facts.findings, telemetry)]
    if gather and trainer.args.world_size > 1:
        of_all_ranks = gather_object(of_all_ranks)
    counters = TransferReport.merge([counted for counted, _, _ in of_all_ranks])
    injected = counters.pop("step_faults")
    findings: list[Any] = []
    telemetry_rows: list[dict[str, Any]] = []
    for rank, (_, found_by_rank, telemetry_of_rank) in enumerate(of_all_ranks):
        findings += found_by_rank
        if telemetry_of_rank is not None:
            telemetry_rows.append({"rank": rank, **telemetry_of_rank})
    weights = trainer.weight_coverage()
    described = trainer.describe()
    batches, between = counters["batches"], counters[BETWEEN_CARDS]
    loss_gradient = products.choose(trainer.mover.device)
    load_seconds = facts.load_seconds
    if load_seconds is not None:
        load_seconds = round(load_seconds, 4)
    seconds = sum(row.get("train_runtime", 0.0) for row in trainer.state.log_history)
    verified_weights = weights.verified_bytes * len(of_all_ranks)
    content = {
        "schema": SCHEMA,
        "run_id": facts.run_id,
        "verify": trainer.mover.settings.verify,
        "fault_injection": trainer.mover.fault_injection(),
        "step_fault_injection": trainer.step_faults.describe(injected),
        "device": describe_device(trainer.mover.device),
        "digest": {"host": asdict(host_method()), "device": asdict(device_method(trainer.mover.device))},
        "loss_gradient": asdict(loss_gradient) if loss_gradient is not None else None,
        "ranks": len(of_all_ranks),
        "versions": versions(),
        "data": list(facts.data),
        "coverage": {
            "verified_bytes": verified_weights + batches["verified_bytes"] + between["verified_bytes"],
            "device_bytes": weights.device_bytes * len(of_all_ranks) + batches["bytes"] + between["bytes"],
            "unverified": weights.unverified,
            "weights_verified_by": weights.verified_by,
            # of all that crossed between host and card, whoever asked for it; ``unverified`` above names tensors
            "crossed": coverage_of(counters),
        },
        **counters,
        "preflight": facts.preflight,
        "grad_sync": described["grad_sync"],
        "weights": {
            **counters["weights"],
            "load_seconds": load_seconds,
            "attested_files": facts.attested_files,
            "not_attested": list(facts.not_attested),
        },
        "batches": {**batches, "verify_share_of_step": _share(batches["verify_seconds"], seconds * len(of_all_ranks))},
        "arithmetic": {**counters["arithmetic"], **described["arithmetic"]},
        "memory": {**counters["memory"], **described["memory"]},
        "auto_fit": facts.auto_fit,
        "split": described["split"],
        "streaming": described["streaming"],
        "survival": survival(
            Path(trainer.args.output_dir),
            facts.run_id,
            skipped_steps=sorted(trainer.skip_steps),
            crash_injection=described["crash_injection"],
        ),
        "findings": findings,
        "telemetry": telemetry_rows,
    }
    return content | {"events": _events(content)}


def write(report: Mapping[str, Any], output_dir: Path) -> Path:
    target = output_dir / FILE_NAME
    write_text_atomic(target, json.dumps(redact_json(report), indent=2, sort_keys=False) + "\n")
    return target


def write_report(trainer: ReportedTrainer, directory: Path) -> list[str]:
    """Write report, log and record of a result that a user's own script saves; returns the names of the first two.
    Collective."""
    data = tuple(summary.to_dict() for summary in getattr(trainer, "data_summaries", {}).values())
    content = build(trainer, RunFacts(run_id=trainer.run_id, data=data), gather=True)
    if trainer.is_world_process_zero():
        write(content, directory)
        write_text_atomic(directory / TRAINER_STATE_NAME, json.dumps(asdict(trainer.state), indent=2) + "\n")
        base = getattr(trainer.accelerator.unwrap_model(trainer.model).config, "name_or_path", None)
        settings = {**trainer.args.to_dict(), "model_name_or_path": base, "world_size": trainer.args.world_size}
        with suppress(UsageError):  # a file of the user's that has its name stays
            record = read_record(directory)
            if record is None or record.run_id == trainer.run_id:
                write_record(directory, replace(new_record(settings), run_id=trainer.run_id, data=data))
    return [FILE_NAME, TRAINER_STATE_NAME]


def write_partial(trainer: ReportedTrainer, facts: RunFacts, error: BaseException) -> None:
    """After a failure: rank 0 writes what it knows, or adds a note to the error if it cannot."""
    if not trainer.is_world_process_zero():
        return
    try:
        write(build(trainer, facts, gather=False), Path(trainer.args.output_dir))
    except OSError as also:
        error.add_note(f"{FILE_NAME} could not be written either: {also}")


def write_incident(trainer: ReportedTrainer, facts: RunFacts, incident: dict[str, Any]) -> None:
    """Record an incident, and write what this rank knows, without asking another one."""
    trainer.transfer_report.incident(incident)
    write(build(trainer, facts, gather=False), Path(trainer.args.output_dir))


def closing_line(report: Mapping[str, Any]) -> str:
    """What the last line of a run counts: tensors, bytes, coverage, mismatches, recovered, step time, events."""
    stages = [report[name] for name in (*STAGES, BETWEEN_CARDS)]
    covered, averages, frozen = report["coverage"], report["gradients"], report["frozen"]
    crossed, batches = covered["crossed"], report["batches"]

    verified = f"{share_words(covered['verified_bytes'], covered['device_bytes'])} of the bytes on the device verified"
    if covered["unverified"]:
        verified += f" (not: {listed([row['tensor'] for row in covered['unverified']])})"
    parts = [f"{_total(stages, 'tensors'):,} tensors", f"{_readable(_total(stages, 'bytes'))} moved", verified]
    if crossed["crossed_bytes"]:
        share = share_words(crossed["verified_bytes"], crossed["crossed_bytes"])
        parts.append(f"{share} of {_readable(crossed['crossed_bytes'])} that crossed verified{_not_crossed(crossed)}")
    parts.append(f"{_total(stages, 'mismatches')} mismatches")
    parts.append(f"{_total(stages, 'recovered')} recovered")
    if report["ranks"] > 1:
        wrong = f"{averages['mismatches']} wrong{_recovered(averages, 'mismatches')}"
        parts.append(f"{averages['buckets']:,} averages of gradients checked, {wrong}")
    watched = f"{frozen['passes']} sentinel passes over {frozen['tensors']} frozen tensors"
    parts.append(f"{watched} ({frozen['mismatches']} changed)")
    parts += _arithmetic_parts(report["arithmetic"])
    parts.append(f"{100 * batches['verify_share_of_step']:.2g} % of step time spent on batch verification")
    parts += [f"{name}: {value}" for name, value in report["events"].items()]
    line = ", ".join(parts)
    if report["fault_injection"] or report["step_fault_injection"] or report["survival"]["crash_injection"]:
        line += " (faults were injected on request)"
    return line


def _total(stages: Sequence[Mapping[str, Any]], key: str) -> int:
    return sum(stage[key] for stage in stages)


def _arithmetic_parts(counted: Mapping[str, Any]) -> list[str]:
    """What the closing line says of the checks of arithmetic."""
    if counted["refusal"]:
        return [f"products with frozen weights not checked ({counted['refusal']})"]
    checked = 100 * counted["checked"] / max(counted["products"], 1)
    noun = "micro-batch" if counted["replays"] == 1 else "micro-batches"
    return [
        f"{checked:.3g} % of the products with frozen weights checked",
        f"{counted['replays']} replayed {noun}",
        f"{counted['disagreements']} disagreements{_recovered(counted, 'disagreements')}",
    ]


def _not_crossed(crossed: Mapping[str, Any]) -> str:
    if not crossed["unverified"]:
        return ""
    names = [f"{row['origin']}: {row['reason']}" for row in crossed["unverified"]]
    return f" (not: {listed(names)})"


def _recovered(counted: Mapping[str, Any], wrong: str) -> str:
    if not counted[wrong]:
        return ""
    return f" ({counted['recovered']} recovered)"


def _events(report: Mapping[str, Any]) -> dict[str, str]:
    """What happened to a run, by name: the end of its closing line, and a part of page and ``README.md``."""
    survival, memory, guard = report["survival"], report["memory"], report["guard"]
    shortages = ""
    if memory["shortages"]:
        shortages = f"{memory['shortages']}, recovered {memory['recovered']}"
    most_parts = memory["micro_batch_divisor"]
    rows = {
        "restarts by the supervisor": max(survival["starts"] - 1, 0),
        "steps left out": ", ".join(map(str, survival["skipped_steps"])),
        "out of memory": shortages,
        "most parts of a micro-batch": most_parts if most_parts > 1 else 0,
        "faults of trained state, undone by going back": report["trained"]["mismatches"],
        "updates skipped, because they were not finite": guard["skipped_steps"],
        "warnings about loss and gradients": guard["warnings"],
    }
    return {name: f"{value}" for name, value in rows.items() if value}


def versions() -> dict[str, str | None]:
    """Versions of Python, HIP and the libraries that train, by name; None: not installed."""
    by_name: dict[str, str | None] = {"python": platform.python_version(), "hip": torch.version.hip}
    for name in _DISTRIBUTIONS:
        by_name[name] = None
        with suppress(metadata.PackageNotFoundError):
            by_name[name] = metadata.version(name)
    return by_name


def _share(part: float, whole: float) -> float:
    if whole <= 0:
        return 0.0
    return round(part / whole, 6)


def _readable(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
