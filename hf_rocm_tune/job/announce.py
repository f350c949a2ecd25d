"""What a run says on the terminal: one block at the start, notes, and the closing lines. Rank 0 speaks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hf_rocm_tune.models.adapter import trainable_parameters
from hf_rocm_tune.redaction import one_line
from hf_rocm_tune.training.report import RunFacts, describe_device

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
    lines = [
        f"device {device['type']} ({device['name']}{memory}), {ranks} process{'es' if ranks > 1 else ''}",
        f"data {data}",
        f"batch {micro} x {accumulation} accumulated x {ranks} = {micro * accumulation * ranks} effective",
        f"verification {mover.settings.verify}, on corruption {mover.settings.on_corruption}, "
        f"frozen weights looked at every {arguments.tune.sentinel_every} steps",
    ]
    sync = arguments.grad_sync
    if ranks > 1 and (sync.way, sync.compression) != ("ddp", "none"):
        where = "through host memory, over gloo" if sync.way == "host" else "by DistributedDataParallel"
        lines.append(f"gradients are averaged {where}, compression {sync.compression}")
    faults = mover.fault_injection()
    if faults is not None:
        lines.append(f"faults are injected on request: {faults}")
    lines += [f"default {row.name}={row.ours} (trl sft: {row.trl}): {row.reason}" for row in arguments.differences]
    return lines


def model(trainer: VerifiedTransferMixin, facts: RunFacts) -> list[str]:
    """What is known once the model is on its device: method, sizes, and how fast and how completely it was verified."""
    base = trainer.model.config
    trainable, total = trainable_parameters(trainer.model)
    weights = trainer.transfer_report.to_dict()["weights"]
    covered = trainer.weight_coverage()
    share = 100 * covered.verified_bytes / max(covered.device_bytes, 1)
    rate = weights["bytes"] / facts.load_seconds / 1e9 if facts.load_seconds else 0.0
    return [
        f"model {base._name_or_path} ({type(trainer.model).__name__} of {base.model_type}), method {method(trainer)}",
        f"trainable {trainable:,} of {total:,} parameters ({100 * trainable / max(total, 1):.3g} %)",
        f"loaded {weights['tensors']:,} tensors, {weights['bytes'] / 1e9:.3g} GB in {facts.load_seconds:.1f} s "
        f"({rate:.2g} GB/s); {share:.4g} % of the bytes on the device verified; "
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
