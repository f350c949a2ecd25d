"""`transfer_report.json`, saved with the adapter: what was moved, what was verified, and what went wrong."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
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
    looked = facts.telemetry.summary() if facts.telemetry else None
    mine = (trainer.transfer_report.to_dict(), facts.findings, looked)
    of_all_ranks = gather_object([mine]) if gather and trainer.args.world_size > 1 else [mine]
    counters = TransferReport.merge([counted for counted, _, _ in of_all_ranks])
    injected = counters.pop("step_faults")
    weights, described = trainer.weight_coverage(), trainer.describe()
    batches, between = counters["batches"], counters[BETWEEN_CARDS]
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
        "loss_gradient": None if (choice := products.choose(trainer.mover.device)) is None else asdict(choice),
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
            "load_seconds": None if facts.load_seconds is None else round(facts.load_seconds, 4),
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
        "findings": [found for _, findings, _ in of_all_ranks for found in findings],
        "telemetry": [{"rank": rank, **seen} for rank, (_, _, seen) in enumerate(of_all_ranks) if seen is not None],
    }
    return content | {"events": _events(content)}


def write(report: Mapping[str, Any], output_dir: Path) -> Path:
    target = output_dir / FILE_NAME
    write_text_atomic(target, json.dumps(redact_json(report), indent=2, sort_keys=False) + "\n")
    return target


def write_report(trainer: ReportedTrainer, directory: Path) -> list[str]:
    """Write report, log and record of a result that a user's own script saves; returns the names of the first two.
    Collective."""
    data = tuple(one.to_dict() for one in getattr(trainer, "data_summaries", {}).values())
    content = build(trainer, RunFacts(run_id=trainer.run_id, data=data), gather=True)
    if trainer.is_world_process_zero():
        write(content, directory)
        write_text_atomic(directory / TRAINER_STATE_NAME, json.dumps(asdict(trainer.state), indent=2) + "\n")
        base = getattr(trainer.accelerator.unwrap_model(trainer.model).config, "name_or_path", None)
        settings = {**trainer.args.to_dict(), "model_name_or_path": base, "world_size": trainer.args.world_size}
        with suppress(UsageError):  # a file of the user's that has its name stays
            if (found := read_record(directory)) is None or found.run_id == trainer.run_id:
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
    tensors, moved, mismatches, recovered = (
        sum(stage[key] for stage in stages) for key in ("tensors", "bytes", "mismatches", "recovered")
    )
    covered, averages, frozen = report["coverage"], report["gradients"], report["frozen"]
    crossed = covered["crossed"]
    products = report["arithmetic"]
    lacking = f" (not: {listed([row['tensor'] for row in covered['unverified']])})" if covered["unverified"] else ""
    share = share_words(covered["verified_bytes"], covered["device_bytes"])
    wrong = f"{products['disagreements']} disagreements{_recovered(products, 'disagreements')}"
    checked = 100 * products["checked"] / max(products["products"], 1)
    watched = f"{frozen['passes']} sentinel passes over {frozen['tensors']} frozen tensors"
    parts = {
        f"{tensors:,} tensors": True,
        f"{_readable(moved)} moved": True,
        f"{share} of the bytes on the device verified{lacking}": True,
        f"{share_words(crossed['verified_bytes'], crossed['crossed_bytes'])} of {_readable(crossed['crossed_bytes'])} "
        f"that crossed verified{_not_crossed(crossed)}": crossed["crossed_bytes"],
        f"{mismatches} mismatches": True,
        f"{recovered} recovered": True,
        f"{averages['buckets']:,} averages of gradients checked, {averages['mismatches']} wrong"
        f"{_recovered(averages, 'mismatches')}": report["ranks"] > 1,
        f"{watched} ({frozen['mismatches']} changed)": True,
        f"{checked:.3g} % of the products with frozen weights checked": not products["refusal"],
        f"{products['replays']} replayed micro-batch{'es' * (products['replays'] != 1)}": not products["refusal"],
        wrong: not products["refusal"],
        f"products with frozen weights not checked ({products['refusal']})": products["refusal"],
        f"{100 * report['batches']['verify_share_of_step']:.2g} % of step time spent on batch verification": True,
        **{f"{name}: {value}": True for name, value in report["events"].items()},
    }
    asked = (report["fault_injection"], report["step_fault_injection"], report["survival"]["crash_injection"])
    said = ", ".join(text for text, applies in parts.items() if applies)
    return f"{said}{' (faults were injected on request)' * any(asked)}"


def _not_crossed(crossed: Mapping[str, Any]) -> str:
    names = [f"{row['origin']}: {row['reason']}" for row in crossed["unverified"]]
    return f" (not: {listed(names)})" if names else ""


def _recovered(counted: Mapping[str, Any], wrong: str) -> str:
    return f" ({counted['recovered']} recovered)" if counted[wrong] else ""


def _events(report: Mapping[str, Any]) -> dict[str, str]:
    """What happened to a run, by name: the end of its closing line, and a part of page and ``README.md``."""
    survival, memory, guard = report["survival"], report["memory"], report["guard"]
    rows = {
        "restarts by the supervisor": max(survival["starts"] - 1, 0),
        "steps left out": ", ".join(map(str, survival["skipped_steps"])),
        "out of memory": f"{memory['shortages']}, recovered {memory['recovered']}" if memory["shortages"] else "",
        "most parts of a micro-batch": memory["micro_batch_divisor"] if memory["micro_batch_divisor"] > 1 else 0,
        "faults of trained state, undone by going back": report["trained"]["mismatches"],
        "updates skipped, because they were not finite": guard["skipped_steps"],
        "warnings about loss and gradients": guard["warnings"],
    }
    return {name: f"{value}" for name, value in rows.items() if value}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "hip": torch.version.hip}
    for name in _DISTRIBUTIONS:
        found[name] = None
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _share(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole > 0 else 0.0


def _readable(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
