"""Planning before a model is loaded: ``--auto_fit``, and the cards and layers of ``--split_layers``.

With ``--auto_fit plan``, what the user did not set of micro-batch, accumulation, checkpointing and evaluation batch is
the fastest by plan that fits this card, at the same effective batch. The choice is made once per run, for the rank with
the least free memory, and kept in ``run.json``: a resumed run uses it however much memory is free then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import psutil
import torch

from hf_rocm_tune.cards.agree import max_over_ranks, on_main_process
from hf_rocm_tune.cards.split import IN_FLIGHT
from hf_rocm_tune.errors import OutOfMemoryError, UsageError
from hf_rocm_tune.models import recompute, streamed
from hf_rocm_tune.models.factory import ModelSource, read_config
from hf_rocm_tune.models.split import FLAG, LayerSplit, SplitMover, counts_for, parse, stack_of
from hf_rocm_tune.models.streamed import Streamed
from hf_rocm_tune.plan import (
    CONTEXT_BYTES,
    GIB,
    TRAINERS,
    CardMemory,
    advice,
    card_memory,
    describe,
    even_counts,
    from_training,
    little_room,
    missing,
    plan_for,
    split_plan,
)
from hf_rocm_tune.settings.arguments import Arguments
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, triton_refusal

Say = Callable[..., None]


# ---- --auto_fit -----------------------------------------------------------------------------------------------------


class Demand(NamedTuple):
    """What the user's settings require of the choice."""

    sequences: int  # of one optimizer step on one rank
    micro_batch: int | None  # as the user set it; None: to be chosen
    checkpointing: bool | None  # likewise


_MICRO_BATCH = "per_device_train_batch_size"
_ACCUMULATION = "gradient_accumulation_steps"
_CHECKPOINTING = {
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
}


def demand(arguments: Arguments) -> Demand:
    """What the user requires, from the flags' values and the names of those that the user set."""
    tune, training = arguments.tune, arguments.training
    given = {name: getattr(training, name) for name in (_MICRO_BATCH, _ACCUMULATION) if name in arguments.given}
    if tune.effective_batch is None:
        sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps
        micro_batch = training.per_device_train_batch_size if given else None
    else:
        sequences, micro_batch = _of_effective_batch(tune.effective_batch, given, training)
    checkpointing = None
    if tune.recompute is not None:
        checkpointing = True
    elif _CHECKPOINTING & {*arguments.given}:
        checkpointing = recompute.is_chosen(training)
    return Demand(sequences, micro_batch, checkpointing)


def _of_effective_batch(effective: int, given: Mapping[str, int], training: Any) -> tuple[int, int | None]:
    """Sequences of a step on one rank, and the micro-batch where it follows from what the user has ``given``."""
    ranks = training.world_size
    sequences, rest = divmod(effective, ranks)
    if rest:
        raise UsageError(f"--effective_batch {effective} cannot be divided evenly over {ranks} processes")
    if not given:
        return sequences, None
    micro_batch = given.get(_MICRO_BATCH) or max(1, sequences // training.gradient_accumulation_steps)
    accumulation = given.get(_ACCUMULATION) or max(1, sequences // micro_batch)
    if micro_batch * accumulation != sequences:
        flags = " and ".join(f"--{name} {value}" for name, value in given.items())
        raise UsageError(f"--effective_batch {effective} on {ranks} rank(s) cannot be made with {flags}: drop one")
    return sequences, micro_batch


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of a run, as in ``run.json`` and the report."""

    micro_batch: int  # sequences at a time on one card; rows where sequences are packed
    accumulation: int  # micro-batches per optimizer step
    checkpointing: bool  # activations are recomputed
    recompute: tuple[int, int] | None  # of which layers; see `estimate.Case`
    eval_batch: int | None  # sequences at a time in evaluation; None: there is none
    streamed: int = 0  # layers whose weights are streamed
    budget_bytes: int  # available to torch's allocator on the rank with least
    predicted_bytes: int  # the allocator's peak by the plan
    free_bytes: int | None = None  # of the budget, that the plan leaves; None: chosen by an earlier version

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> Choice:
        """The choice in ``run.json``."""
        try:
            layers = values["recompute"]
            return cls(**{**values, "recompute": layers and tuple(layers)})
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"run.json holds a choice of --auto_fit that cannot be used ({error}): choose another --output_dir, or "
                "give --overwrite_output_dir"
            ) from error


def before_loading(
    arguments: Arguments,
    recorded: Mapping[str, Any] | None,
    *,
    libraries: int,
    say: Say,
    pictures: tuple[int, tuple[Any, ...]] = (0, ()),
) -> Choice | None:
    """Chooses before the model is loaded, and writes the choice into the arguments; None without one. Collective.

    ``recorded``: the choice in ``run.json``; ``libraries``: bytes of the card that they hold already;
    ``pictures``: tokens of pictures of the largest row, and their tensors.
    """
    tune, training = arguments.tune, arguments.training
    if tune.auto_fit == "off":
        return None
    if arguments.method not in TRAINERS:
        raise UsageError(f"--auto_fit plans {', '.join(TRAINERS)}, not {arguments.method}: leave it out")
    wanted = demand(arguments)
    if recorded is not None:
        choice = Choice.from_record(recorded)
        say(f"auto-fit: {describe(vars(choice))}, as this run began (run.json)")
    else:
        budget = _budget(training.device, tune.auto_fit_gib, libraries)
        if budget is None:
            micro_batch = wanted.micro_batch
            if not micro_batch:  # the largest that divides the step
                sizes = range(training.per_device_train_batch_size, 0, -1)
                micro_batch = next(size for size in sizes if wanted.sequences % size == 0)
            training.per_device_train_batch_size = micro_batch
            training.gradient_accumulation_steps = wanted.sequences // micro_batch
            say("auto-fit: there is no card, so nothing is chosen; --auto_fit_gib N plans for N GiB")
            return None
        choice = on_main_process(lambda: _planned(arguments, wanted, budget, say=say, pictures=pictures))
        say(*_why(choice, wanted, arguments))
    training.per_device_train_batch_size = choice.micro_batch
    training.gradient_accumulation_steps = choice.accumulation
    recompute.choose(training, choice.checkpointing)
    if choice.eval_batch is not None:
        training.per_device_eval_batch_size = choice.eval_batch
    return choice


def _planned(
    arguments: Arguments,
    wanted: Demand,
    budget: int,
    flag: str = "--auto_fit plan",
    *,
    say: Say,
    pictures: Any = (0, ()),
) -> Choice:
    """The plan's choice."""
    training = arguments.training
    platform = _platform(training.device)
    evaluates = training.eval_strategy != "no"
    eval_batch = None
    if evaluates and "per_device_eval_batch_size" in arguments.given:
        eval_batch = training.per_device_eval_batch_size
    placeholders, picture_tensors = pictures
    request = replace(
        from_training(arguments.resolved(), trainer=arguments.method, cards=training.world_size, platform=platform),
        effective_batch=wanted.sequences * training.world_size,
        micro_batch=wanted.micro_batch,
        checkpointing=wanted.checkpointing,
        triton=not triton_refusal(training.device),
        one_pass_loss=arguments.one_pass_loss,
        evaluates=evaluates,
        eval_batch=eval_batch,
        placeholders=placeholders,
        pictures=picture_tensors,
    )
    plan = plan_for(request, card=_card_of(budget))
    if picture_tensors and not plan.request.pictures:
        say(
            "warning: auto-fit: pictures of this architecture cannot be counted, only their tokens: a step takes more "
            "memory than is planned"
        )
    estimate = plan.nearest
    case = estimate.case
    if plan.choice is None:
        raise OutOfMemoryError(
            f"{flag}: nothing fits by estimate: {describe(vars(case))} needs {_gib(estimate.total)} GiB, and "
            f"{_gib(budget)} GiB are free ({missing(estimate)}): {advice(plan, training=True)}"
        )
    return Choice(
        micro_batch=case.micro_batch,
        accumulation=case.accumulation,
        checkpointing=case.checkpointing,
        recompute=case.recompute,
        eval_batch=case.eval_batch,
        streamed=case.streamed,
        budget_bytes=budget,
        predicted_bytes=int(estimate.allocated),
        free_bytes=int(estimate.spare),
    )


def _card_of(budget: int) -> CardMemory:
    """A card with so much for torch's allocator: without the memory of other programs and of the context."""
    memory = psutil.virtual_memory().total
    return replace(card_memory(), name="this card", usable=budget, desktop=0, context=0, host=memory)


def _why(choice: Choice, wanted: Demand, arguments: Arguments) -> list[str]:
    effective = wanted.sequences * arguments.training.world_size
    lines = [
        f"auto-fit: {describe(vars(choice))} for {effective} sequences a step, fastest by estimate",
        f"auto-fit: predicted peak {_gib(choice.predicted_bytes)} GiB of {_gib(choice.budget_bytes)} GiB available",
    ]
    if choice.free_bytes is not None:
        warning = little_room(choice.free_bytes, _card_of(choice.budget_bytes))
        if warning:
            lines.append(f"auto-fit: {warning}")
    flags = ("torch_compile", "use_liger_kernel", "activation_offloading")
    uncounted = [f"--{name}" for name in flags if getattr(arguments.training, name, False)]
    if uncounted:
        lines.append(f"auto-fit: the plan does not count what {' and '.join(uncounted)} would change")
    if arguments.one_pass_loss:
        lines.append("auto-fit: --one_pass_loss true: losses equal TRL's to rounding (with a head that is not trained)")
    elif arguments.tune.one_pass_loss is None and arguments.method == "sft" and not arguments.training.torch_compile:
        lines.append("auto-fit: TRL's own loss: its fused head is not one that --one_pass_loss knows")
    return lines


def _budget(device: torch.device, gib: float | None, libraries: int) -> int | None:
    """Bytes for torch's allocator on the rank with least; None without a card and without a figure. Collective.

    On a CPU only the user's figure counts.
    """
    bounds = []
    if gib is not None:
        bounds.append(int(gib * GIB))
    to_come = 0
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        bounds.append(free + torch.cuda.memory_reserved(device))
        to_come = max(0, CONTEXT_BYTES - libraries)  # kernels and workspaces that a step will still load
    if not bounds:
        return None
    here = min(bounds) - to_come
    return -max_over_ranks([-here])[0]  # the least of all ranks


def _platform(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip:
        return "hip"
    return "cuda"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"


# ---- recomputation ----------------------------------------------------------------------------------------------


def check_recomputation(arguments: Arguments, source: ModelSource) -> None:
    """Refuses ``--recompute_layers`` for more layers than the model has."""
    counts = arguments.tune.recompute
    if counts is not None:
        text_config = read_config(source).get_text_config()
        recompute.check(counts, getattr(text_config, "num_hidden_layers", sum(counts)))


# ---- weight streaming ---------------------------------------------------------------------------------------------


def streamed_layers(
    arguments: Arguments,
    source: ModelSource,
    choice: Choice | None,
    *,
    libraries: int,
    say: Say,
    pictures: tuple[int, tuple[Any, ...]] = (0, ()),
) -> Streamed | None:
    """The layers that are streamed; None: none. ``choice`` of ``--auto_fit``; ``libraries``: bytes of the card that
    libraries of this process hold already; ``pictures`` as in `before_loading`. Collective."""
    count = streamed.parse(arguments.tune.stream_weights)
    if not count:
        return None
    training = arguments.training
    config = read_config(source)
    stack, layers = stack_of(config, streamed.FLAG, trust_remote_code=source.trust_remote_code)
    from_files = source.quantization is None and getattr(config, "quantization_config", None) is None
    if choice is not None:
        count = choice.streamed
    elif count == streamed.AUTO and arguments.ranks.split_layers is not None:
        raise UsageError(f"{streamed.FLAG} auto is not planned for {FLAG}: give the number of layers")
    elif count == streamed.AUTO:
        budget = _budget(training.device, None, libraries)
        if budget is None:
            say(f"{streamed.FLAG} auto: there is no card, so nothing is streamed")
            return None
        micro_batch = training.per_device_train_batch_size
        sequences = micro_batch * training.gradient_accumulation_steps
        wanted = Demand(sequences, micro_batch, recompute.is_chosen(training))
        planned = on_main_process(
            lambda: _planned(arguments, wanted, budget, f"{streamed.FLAG} auto", say=say, pictures=pictures)
        )
        count = planned.streamed
        say(f"predicted peak {_gib(planned.predicted_bytes)} GiB of {_gib(budget)} GiB available")
    if not count:
        say(f"{streamed.FLAG} auto: everything fits, nothing is streamed")
        return None
    say(f"{count} of {layers} layers are streamed")
    return Streamed(stack, streamed.spread(count, layers), from_files=from_files)


# ---- one model over several cards -------------------------------------------------------------------------------


def make_mover(arguments: Arguments, source: ModelSource, *, say: Say) -> Mover:
    """The mover of a run, for one device or for the cards of a split."""
    training, tune = arguments.training, arguments.tune
    settings = TransferSettings(verify=tune.verify, on_corruption=tune.on_corruption)
    faults = FaultSpec.from_environment()
    if arguments.ranks.split_layers is None:
        return Mover(training.device, settings=settings, faults=faults)
    config = read_config(source)
    stack, layers = stack_of(config, trust_remote_code=source.trust_remote_code)
    wanted = None
    given = parse(arguments.ranks.split_layers)
    if given:
        wanted = counts_for(given, layers)
    devices = _devices(training.device, len(wanted) if wanted else None, layers)
    training._n_gpu = 1  # with several cards visible transformers would count a batch for each of them
    counts = wanted or even_counts(layers, len(devices))
    try:
        counts = _planned_counts(arguments, config, devices, wanted, say)
    except UsageError as error:
        say(f"split: {_shared(counts)}; the memory of each card could not be planned ({error})")
    return SplitMover(LayerSplit(stack, counts), devices, settings=settings, faults=faults)


def _devices(first: torch.device, wanted: int | None, layers: int) -> list[torch.device]:
    """The cards to use, the trainer's first; two logical ones on a CPU."""
    on_cards = first.type == "cuda"
    if on_cards:
        seen = torch.cuda.device_count()
    else:
        seen = wanted or 2
    cards = wanted or seen
    if cards < 2 or cards > seen:
        raise UsageError(
            f"{FLAG} needs {max(cards, 2)} cards and this process sees {seen}: see `hf-rocm-tune doctor`, and "
            "HIP_VISIBLE_DEVICES where you have set it"
        )
    if cards > layers:
        raise UsageError(f"{FLAG}: {layers} layers cannot be distributed over {cards} cards")
    if on_cards:
        return [torch.device("cuda", index) for index in range(cards)]
    return [first] * cards


def _planned_counts(
    arguments: Arguments, config: Any, devices: Sequence[torch.device], wanted: tuple[int, ...] | None, say: Say
) -> tuple[int, ...]:
    """The number of layers on each card; prints the planned memory of each. UsageError: it cannot be planned."""
    training = arguments.training
    on_cards = devices[0].type == "cuda"
    cards = [_memory_of(device) for device in devices]
    request = replace(
        from_training(arguments.resolved(), platform=_platform(devices[0])),
        triton=not triton_refusal(devices[0]),
        micro_batch=training.per_device_train_batch_size,
        checkpointing=recompute.is_chosen(training),
        stream=0,
    )
    flights = IN_FLIGHT * len(cards) if arguments.ranks.pipeline == "auto" else 1
    whole = plan_for(request, card=cards[0], config=config)
    plan = split_plan(whole, cards=cards, counts=wanted, flights=flights)
    where = f"{len(devices)} cards" if on_cards else f"{len(devices)} logical cards on the CPU"
    say(f"split: {_shared(plan.counts)} on {where}; transfers between them go through the host, verified")
    planned_flights = plan.estimates[0].case.flights
    if planned_flights > 1:
        say(f"split: planned with the activations of {planned_flights} micro-batches in flight")
    say(*(f"split: planned {line}" for line in plan.lines()))
    if on_cards and not plan.fits:
        say("split: by this plan it does not fit; `hf-rocm-tune plan --cards 2` searches for settings that do")
    return plan.counts


def _memory_of(device: torch.device) -> CardMemory:
    """The memory of a card as it is now; a logical one is planned as an RX 7900 XT."""
    if device.type != "cuda":
        return card_memory(name="rx7900xt")
    free, total = torch.cuda.mem_get_info(device)
    return CardMemory(name="this card", usable=total, desktop=max(0, total - free - CONTEXT_BYTES))


def _shared(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts)) + " layers"
