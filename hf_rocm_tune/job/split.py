"""``--split_layers``: from the flag to the cards, the cut and the mover of a run, before the model is loaded.

What a split cannot do is refused here, in one line. The planned memory of each card is said before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.split import FLAG, Split, counts_for, parse, stack_of
from hf_rocm_tune.models.split_mover import SplitMover
from hf_rocm_tune.plan import CONTEXT_BYTES, CardMemory, SplitPlan, card_memory, from_training, split_plan
from hf_rocm_tune.plan.split import even_counts, memory_lines
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings

if TYPE_CHECKING:
    from hf_rocm_tune.models.factory import ModelSource
    from hf_rocm_tune.settings.arguments import Arguments

Say = Callable[..., None]
_LOGICAL_CARDS = 2


def make_mover(arguments: Arguments, source: ModelSource, *, say: Say) -> Mover:
    """The door of a run: of one device, or of the cards of a split.

    Raises:
        UsageError: the split cannot be, and why.
    """
    training, tune, text = arguments.training, arguments.tune, arguments.ranks.split_layers
    settings = TransferSettings(verify=tune.verify, on_corruption=tune.on_corruption)
    faults = FaultSpec.from_environment()
    if text is None:
        return Mover(training.device, settings=settings, faults=faults)
    given = parse(text)
    _refuse(arguments)
    config = _config(source)
    stack, layers = stack_of(config, trust_remote_code=source.trust_remote_code)
    wanted = counts_for(given, layers) if given else None
    devices = _devices(training.device, len(wanted) if wanted else None, layers)
    training._n_gpu = 1  # with several cards visible transformers would count a batch for each of them
    counts = _planned(arguments, config, devices, wanted, layers, say)
    return SplitMover(Split.of(stack, counts), devices, settings=settings, faults=faults)


def _refuse(arguments: Arguments) -> None:
    """What does not go together with a split."""
    training, tune = arguments.training, arguments.tune
    reasons = {
        "several processes: a split is one process, start it without --num_processes": training.world_size > 1,
        "--fp16, whose gradient scaler copies between cards by itself: use --bf16": training.fp16,
        "--auto_fit, which fits one card: choose the batch by `hf-rocm-tune plan --split`": tune.auto_fit != "off",
        "--activation_offloading, which keeps one card's streams only": training.activation_offloading,
        "--torch_compile": training.torch_compile,
        "--fsdp and --deepspeed": bool(training.fsdp or training.deepspeed),
        "--attn_implementation flex_attention, whose masks are no tensors": arguments.model.attn_implementation
        == "flex_attention",
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise UsageError(f"{FLAG} does not go together with {'; nor with '.join(found)}")


def _config(source: ModelSource) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source.name, revision=source.revision, trust_remote_code=source.trust_remote_code)


def _devices(first: torch.device, wanted: int | None, layers: int) -> list[torch.device]:
    """The cards to use, the trainer's first.

    Raises:
        UsageError: there are too few.
    """
    if first.type != "cuda":
        cards = wanted or _LOGICAL_CARDS
        seen = cards
    else:
        seen = torch.cuda.device_count()
        cards = wanted or seen
    if cards < 2 or cards > seen:
        raise UsageError(
            f"{FLAG} needs {max(cards, 2)} cards and this process sees {seen}: see `hf-rocm-tune doctor`, and "
            "HIP_VISIBLE_DEVICES where you have set it"
        )
    if cards > layers:
        raise UsageError(f"{FLAG}: {layers} layers cannot be shared out over {cards} cards")
    return [first] * cards if first.type != "cuda" else [torch.device("cuda", index) for index in range(cards)]


def _planned(
    arguments: Arguments,
    config: Any,
    devices: Sequence[torch.device],
    wanted: tuple[int, ...] | None,
    layers: int,
    say: Say,
) -> tuple[int, ...]:
    """The number of layers on each card; what each is planned to take is said."""
    cards = [_memory(device) for device in devices]
    logical = devices[0].type != "cuda"
    try:
        plan = _plan(arguments, config, cards, wanted, logical)
    except UsageError as error:
        counts = wanted or even_counts(layers, [card.free for card in cards])
        say(f"split: {_shared(counts)}; the memory of each card could not be planned ({error})")
        return counts
    counts = plan.counts
    how = "as given" if wanted else "so that the fullest card has most left"
    where = f"{len(devices)} logical cards on the CPU" if logical else f"{len(devices)} cards"
    say(f"split: {_shared(counts)} on {where}, {how}; what crosses between them is staged through the host, verified")
    for line in memory_lines(plan.counts, plan.estimates, plan.cards):
        say(f"split: planned {line}")
    if not logical and not plan.cut.fits:
        say("split: by this plan it does not fit; `hf-rocm-tune plan --split` looks for a way that does")
    return counts


def _plan(
    arguments: Arguments, config: Any, cards: Sequence[CardMemory], wanted: tuple[int, ...] | None, logical: bool
) -> SplitPlan:
    settings: Mapping[str, Any] = arguments.resolved()
    platform = "cpu" if logical else "hip" if torch.version.hip else "cuda"
    asked = from_training(settings, platform=platform)
    request = replace(
        asked,
        micro_batch=arguments.training.per_device_train_batch_size,
        checkpointing=bool(arguments.training.activation_checkpointing),
    )
    return split_plan(request, cards=cards, counts=wanted, config=config)


def _memory(device: torch.device) -> CardMemory:
    """The memory of a card as it is now; a logical one is planned as an RX 7900 XT."""
    if device.type != "cuda":
        return card_memory(name="rx7900xt")
    free, total = torch.cuda.mem_get_info(device)
    return CardMemory(
        name=torch.cuda.get_device_name(device),
        usable=total,
        desktop=max(0, total - free - CONTEXT_BYTES),
        desktop_source="read",
    )


def _shared(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts)) + " layers"
