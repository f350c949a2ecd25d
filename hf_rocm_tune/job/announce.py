"""What a run says on the terminal, its settings, its model, and what the doctor reads of the machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.doctor.diagnose import all_checks, diagnose
from hf_rocm_tune.doctor.findings import Evidence, Finding, from_row, own_environ, unknown
from hf_rocm_tune.doctor.system import of_decision
from hf_rocm_tune.machine import variables
from hf_rocm_tune.machine.software import Software, read_software
from hf_rocm_tune.machine.survey import survey
from hf_rocm_tune.models.factory import trainable_parameters
from hf_rocm_tune.redaction import one_line
from hf_rocm_tune.training.report import RunFacts
from hf_rocm_tune.training.telemetry import describe_device

if TYPE_CHECKING:
    from hf_rocm_tune.settings.arguments import Arguments
    from hf_rocm_tune.training.trainer import VerifiedTransferMixin
    from hf_rocm_tune.transfer import Mover

PREFIX = "hf-rocm-tune: "


def say(*lines: str) -> None:
    """Prints lines on rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        for line in lines:
            print(PREFIX + one_line(line), flush=True)


def say_of_this_rank(*lines: str) -> None:
    """Prints lines on whichever rank has them: what a rank says of its own card no other rank knows."""
    rank = f"rank {os.environ.get('RANK', '0')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    for line in lines:
        print(f"{PREFIX}{rank}{one_line(line)}", flush=True)


def settings(arguments: Arguments, data: str, mover: Mover) -> list[str]:
    """What is known before the model is loaded: device, batches, verification, data, and where we differ from TRL."""
    training = arguments.training
    device = describe_device(mover.device)
    memory = f", {device['memory_bytes'] / 2**30:.1f} GiB" if "memory_bytes" in device else ""
    micro, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    ranks = training.world_size
    on = f"device {device['type']} ({device['name']}{memory}), {ranks} process{'es' if ranks > 1 else ''}"
    batch = f"batch {micro} x {accumulation} accumulated x {ranks} = {micro * accumulation * ranks} effective"
    verification = f"verification {mover.settings.verify}"
    if arguments.tune.verbose:
        verification += (
            f", on corruption {mover.settings.on_corruption}, "
            f"frozen weights looked at every {arguments.tune.sentinel_every} steps"
        )
        lines = [on, f"data {data}", batch, verification]
    else:
        lines = [f"data {data}", f"{on}, {batch}, {verification}"]
    sync = arguments.grad_sync
    if ranks > 1 and (sync.way, sync.compression) != ("ddp", "none"):
        where = "through host memory, over gloo" if sync.way == "host" else "by DistributedDataParallel"
        lines.append(f"gradients are averaged {where}, compression {sync.compression}")
    faults = mover.fault_injection()
    if faults is not None:
        lines.append(f"faults are injected on request: {faults}")
    if arguments.tune.verbose:
        return lines + [
            f"default {row.name}={row.ours} (trl {arguments.method}: {row.trl}): {row.reason}"
            for row in arguments.differences
        ]
    ours = ", ".join(f"{row.name}={row.ours}" for row in arguments.differences)
    return [*lines, f"defaults other than trl's: {ours} (-v says why)"] if ours else lines


def model(trainer: VerifiedTransferMixin, facts: RunFacts, *, verbose: bool) -> list[str]:
    """What is known once the model is on its device: method, sizes, and how fast and how completely it was verified."""
    base = trainer.model.config
    trainable, total = trainable_parameters(trainer.model)
    weights = trainer.transfer_report.to_dict()["weights"]
    covered = trainer.weight_coverage()
    share = 100 * covered.verified_bytes / max(covered.device_bytes, 1)
    rate = weights["bytes"] / facts.load_seconds / 1e9 if facts.load_seconds else 0.0
    count = f"{trainable:,} of {total:,} parameters ({100 * trainable / max(total, 1):.3g} %)"
    verified = f"{share:.4g} % of the bytes on the device verified"
    if not verbose:
        return [
            f"model {base._name_or_path}: {method(trainer)}, {count} trained; loaded in {facts.load_seconds:.1f} s, "
            f"{verified}"
        ]
    return [
        f"model {base._name_or_path} ({type(trainer.model).__name__} of {base.model_type}), method {method(trainer)}",
        f"trainable {count}",
        f"loaded {weights['tensors']:,} tensors, {weights['bytes'] / 1e9:.3g} GB in {facts.load_seconds:.1f} s "
        f"({rate:.2g} GB/s); {verified}; "
        f"files attested {facts.attested_files}, not attested {len(facts.not_attested)}",
    ]


def method(trainer: VerifiedTransferMixin) -> str:
    configs = getattr(trainer.model, "peft_config", None)
    if not configs:
        return "full fine-tuning"
    config = next(iter(configs.values()))
    base = trainer.model.get_base_model()
    bits = 4 if getattr(base, "is_loaded_in_4bit", False) else 8 if getattr(base, "is_loaded_in_8bit", False) else None
    kind = "DoRA" if getattr(config, "use_dora", False) else config.peft_type.value
    name = f"Q{kind} ({bits}-bit)" if bits else kind
    return f"{name}, r={getattr(config, 'r', '-')}, alpha={getattr(config, 'lora_alpha', '-')}"


# ---- this machine ---------------------------------------------------------------------------------------------

DEADLINE_S = 5.0
_VARIABLES = "variables"
_ON_THE_PROCESSOR = ("no_gpu", "no_card")
"""Rows that say that training would run on the processor: a run that does has just named its device."""


def look(*, doctor: bool, say: Callable[[str], None], deadline_s: float = DEADLINE_S) -> tuple[dict[str, Any], ...]:
    """Look at this machine, on its first rank.

    Nothing is run on the card, and torch, which this process trains with, is asked here and not in a child process.
    A failure does not stop the run. What is certain to end it (a card that torch does not see, a wheel without kernels
    for it) ends it at once by itself, and the line printed just before says why. All else is a reading or a report of
    others that may not hold here, and the run's own verification judges what really arrives.

    Args:
        doctor: False leaves only what the policy of environment variables has found already.
        say: takes a line for each warning and failure but for what was said already: variables were spoken of when the
            package was imported, and of the processor as the device by the run.
        deadline_s: seconds after which the run goes on without an answer: a driver may hang inside a read.

    Returns:
        The findings as plain values; nothing on the other ranks.
    """
    if os.environ.get("LOCAL_RANK", "").strip() not in ("", "0", "-1"):
        return ()
    found: list[Finding] = []
    if doctor:
        software = read_software(in_process=True)
        found = _within(deadline_s, software, own_environ(os.environ))
        known = () if software.devices.value else _ON_THE_PROCESSOR
        grave = [finding for finding in found if finding.status in ("warn", "fail") and finding.row not in known]
        for finding in grave:
            if finding.check != _VARIABLES:
                say(_line(finding))
    told = {finding.subject for finding in found if finding.check == _VARIABLES}
    # A variable that is too late to set, or a choice of cards that cannot hold, is known to this process alone.
    late = [one for one in variables.DECISIONS if one.action in ("warn", "error") and one.variable not in told]
    return tuple(finding.to_dict() for finding in [*found, *(of_decision(one) for one in late)])


def _within(deadline_s: float, software: Software, variables: Mapping[str, str]) -> list[Finding]:
    """The findings of all checks that read, or one that says that there was no answer in time."""
    found: list[Finding] = []

    def read() -> None:
        try:
            evidence = Evidence(machine=survey(), software=software, environ=variables)
            done = diagnose(evidence, [check for check in all_checks() if not check.measured])
            found.extend(finding for finding in done.findings if finding.status != "skipped")
        except Exception as error:  # a bug of ours; it is reported as such, and is no reason to refuse a run
            what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            found.append(from_row("check_crashed", check="machine", name="machine", error=what))

    reader = threading.Thread(target=read, name="doctor", daemon=True)
    reader.start()
    reader.join(deadline_s)
    if reader.is_alive():
        reason = f"reading the kernel's files took more than {deadline_s:g} seconds; `hf-rocm-tune doctor` may say more"
        return [unknown(reason, check="machine")]
    return found


def _line(finding: Finding) -> str:
    label = "warning" if finding.status == "warn" else "failure"
    cure = f"; {finding.cure}" if finding.cure else ""
    return " ".join(f"{label}: {finding.title}: {finding.text}{cure} ({'; '.join(finding.sources)})".split())
