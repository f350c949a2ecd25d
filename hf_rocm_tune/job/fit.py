"""Planning before a model is loaded: ``--auto_fit``, and the cards and layers of ``--split_layers``.

    off     micro-batch, accumulation and checkpointing are as given or by default
    plan    those that the user did not set are the fastest by plan that fit this card, at the same effective batch
    probe   as ``plan``, then corrected by worst-case steps before the run, down or up

The choice is made once per run and kept in ``run.json``, so a resumed run uses it however much memory is free then. All
ranks use the same choice, made for the rank with the least free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from hf_rocm_tune.cards.agree import highest, on_main_process
from hf_rocm_tune.cards.pipeline import IN_FLIGHT
from hf_rocm_tune.errors import OutOfMemoryError, UsageError
from hf_rocm_tune.models import recompute
from hf_rocm_tune.models.split import FLAG, Split, SplitMover, counts_for, parse, stack_of
from hf_rocm_tune.plan import (
    CONTEXT_BYTES,
    GIB,
    CardMemory,
    PlanRequest,
    card_memory,
    from_training,
    plan_for,
    split_plan,
)
from hf_rocm_tune.plan.candidates import (
    Candidate,
    Choice,
    Demand,
    Trial,
    demand,
    fastest_that_fitted,
    next_candidate,
)
from hf_rocm_tune.plan.estimate import cpu_rates
from hf_rocm_tune.plan.fit import even_counts, memory_lines
from hf_rocm_tune.settings.arguments import Arguments
from hf_rocm_tune.train.probe import set_way, try_on_all_ranks
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings

if TYPE_CHECKING:
    from hf_rocm_tune.models.factory import ModelSource
    from hf_rocm_tune.train.trainer import VerifiedTransferMixin

Say = Callable[..., None]
_LOGICAL_CARDS = 2


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What is chosen before the model is loaded."""

    choice: Choice
    candidates: tuple[Candidate, ...] = ()  # all of them, for the probe; empty when the choice is settled
    settled: bool = True  # no probe follows: the choice is the plan's, or from ``run.json``


def before_loading(arguments: Arguments, recorded: Mapping[str, Any] | None, *, libraries: int, say: Say) -> Fit | None:
    """Chooses before the model is loaded, and writes the choice into the arguments. Collective.

    Args:
        arguments: of the job; the three settings change, and nothing else.
        recorded: the choice in ``run.json`` of a resumed run.
        libraries: bytes of the card that libraries of this process hold already.
        say: takes lines for the user.

    Returns:
        None if nothing was chosen: it is off, or there is no card.

    Raises:
        UsageError: the effective batch cannot be divided, or this job cannot be planned.
        OutOfMemoryError: nothing fits by the plan.
    """
    tune, training = arguments.tune, arguments.training
    if tune.auto_fit == "off":
        return None
    if arguments.method != "sft":
        if tune.effective_batch is not None:
            raise UsageError(
                f"--effective_batch is for supervised fine-tuning: with {arguments.method} give "
                "--per_device_train_batch_size and --gradient_accumulation_steps"
            )
        say(f"auto-fit: only supervised fine-tuning can be planned, not {arguments.method}: nothing is chosen")
        return None
    wanted = demand_of(arguments, ranks=training.world_size)
    if tune.recompute is not None:
        wanted = replace(wanted, checkpointing=True)
    if recorded is not None:
        found = Fit(choice=Choice.from_record(recorded, wanted))
        say(f"auto-fit: {found.choice.describe()}, as this run began (run.json)")
    else:
        budget = _budget(training.device, tune.auto_fit_gib, libraries)
        if budget is None:
            training.per_device_train_batch_size = wanted.largest_up_to(training.per_device_train_batch_size)
            training.gradient_accumulation_steps = wanted.each // training.per_device_train_batch_size
            say("auto-fit: there is no card, so nothing is chosen; --auto_fit_gib N plans for N GiB")
            return None
        found = on_main_process(lambda: _planned(arguments, wanted, budget))
        say(*_why(found, wanted, arguments))
    choice = found.choice
    training.per_device_train_batch_size = choice.micro_batch
    training.gradient_accumulation_steps = choice.accumulation
    training.activation_checkpointing = training.gradient_checkpointing = choice.checkpointing
    return found


def probed(found: Fit, trainer: VerifiedTransferMixin, *, say: Say) -> Fit:
    """Corrects a choice with the real model, and sets the trainer to it. Collective.

    Args:
        found: from `before_loading`; a settled one is returned as it is.
        trainer: built with it, not yet trained.
        say: takes lines for the user.

    Raises:
        OutOfMemoryError: no candidate that the user's settings allow fits a worst-case step.
    """
    if found.settled:
        return found
    budget = found.choice.budget_bytes
    first = next(one for one in found.candidates if _same(one, found.choice))
    trials: list[Trial] = []
    while (candidate := next_candidate(found.candidates, trials, first=first, budget=budget)) is not None:
        trials.append(try_on_all_ranks(trainer, candidate, budget=budget))
        say(f"auto-fit: tried {candidate.describe()}: {_outcome(trials[-1])}")
    best = fastest_that_fitted(trials)
    if best is None:
        raise OutOfMemoryError(
            f"--auto_fit probe: a worst-case step does not fit with any choice that keeps the effective batch and your "
            f"settings ({len(trials)} tried, the last {trials[-1].candidate.describe()}): {_advice(trainer.args)}"
        )
    choice = Choice.of(best.candidate, mode="probe", budget=budget, measured=best.measured, tries=len(trials))
    set_way(trainer, choice)
    say(f"auto-fit: {choice.describe()}, after {len(trials)} worst-case step{'s' if len(trials) > 1 else ''}")
    return Fit(choice=choice)


# ---- before the model is loaded -----------------------------------------------------------------------------


def check_recomputation(arguments: Arguments, source: ModelSource) -> None:
    """Refuses ``--recompute_layers`` for more layers than the model has.

    Raises:
        UsageError: with the reason.
    """
    if (counts := arguments.tune.recompute) is None:
        return
    recompute.check(counts, getattr(_config(source).get_text_config(), "num_hidden_layers", sum(counts)))


def _config(source: ModelSource) -> Any:
    return AutoConfig.from_pretrained(source.name, revision=source.revision, trust_remote_code=source.trust_remote_code)


def _budget(device: torch.device, gib: float | None, libraries: int) -> int | None:
    """Bytes for torch's allocator on the rank with least; None without a card and without a figure. Collective.

    On a CPU only the user's figure counts.
    """
    bounds = [] if gib is None else [int(gib * GIB)]
    if device.type == "cuda":
        bounds.append(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    if not bounds:
        return None
    # kernels and workspaces that a step will still load
    still_to_come = max(0, CONTEXT_BYTES - libraries) if device.type == "cuda" else 0
    return -highest([still_to_come - min(bounds)])[0]


def _planned(arguments: Arguments, wanted: Demand, budget: int) -> Fit:
    """The plan's choice, on the main process.

    Raises:
        UsageError: this job cannot be planned.
        OutOfMemoryError: nothing fits, and no probe follows.
    """
    mode = arguments.tune.auto_fit
    # the budget is free memory, without that of other programs and the context
    card = replace(card_memory(), name="this card", usable=budget, desktop=0, desktop_source="read", context=0)
    if arguments.training.device.type == "cpu":
        card = replace(card, rates=cpu_rates(torch.get_num_threads()))
    try:
        request = request_of(arguments, wanted, _platform(arguments.training.device))
    except UsageError as error:
        raise UsageError(f"--auto_fit: {error}") from error
    plan = plan_for(request, card=card, grid=False)
    least = plan.nearest
    if plan.choice is None and mode == "plan":
        raise OutOfMemoryError(
            f"--auto_fit plan: nothing fits by estimate: {Candidate.of(least).describe()} needs "
            f"{_gib(least.total)} GiB, and {_gib(budget)} GiB are free: {_advice(arguments.training)}; or use "
            "--auto_fit probe"
        )
    return Fit(
        choice=Choice.of(Candidate.of(least), mode=mode, budget=budget),
        candidates=tuple(Candidate.of(option) for option in plan.grid),
        settled=mode == "plan",
    )


def demand_of(arguments: Arguments, *, ranks: int) -> Demand:
    """What the job's flags require of a choice for that many ranks.

    Raises:
        UsageError: they cannot make the effective batch.
    """
    training = arguments.training
    return demand(
        ranks=ranks,
        effective_batch=arguments.tune.effective_batch,
        micro_batch=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        checkpointing=bool(training.activation_checkpointing),
        given=arguments.given,
    )


def request_of(arguments: Arguments, wanted: Demand, platform: str) -> PlanRequest:
    """The request to plan the job.

    Raises:
        UsageError: this job cannot be planned.
    """
    return replace(
        from_training(arguments.resolved(), cards=wanted.ranks, platform=platform),
        effective_batch=wanted.effective_batch,
        micro_batch=wanted.micro_batch,
        checkpointing=wanted.checkpointing,
        one_pass_loss=arguments.one_pass_loss,
    )


def _platform(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "hip" if torch.version.hip else "cuda"


def _why(found: Fit, wanted: Demand, arguments: Arguments) -> list[str]:
    choice = found.choice
    chosen = next(one for one in found.candidates if _same(one, choice))
    fits = chosen.fits(choice.budget_bytes)
    kept = [f"micro-batch {wanted.micro_batch}"] if wanted.micro_batch is not None else []
    if wanted.checkpointing is not None:
        on = "on" if wanted.checkpointing else "off"
        kept.append(f"activation checkpointing {arguments.tune.recompute_layers or on}")
    reason = "the fastest by estimate that fits" if fits else "none fits by estimate, this one needs the least memory"
    lines = [
        f"auto-fit: {choice.describe()} for {wanted.effective_batch} sequences a step: {reason}, "
        f"{len(found.candidates)} considered",
        f"auto-fit: predicted peak {_gib(choice.predicted_bytes)} GiB of {_gib(choice.budget_bytes)} GiB available",
    ]
    flags = ("torch_compile", "use_liger_kernel", "activation_offloading")
    if uncounted := [f"--{name}" for name in flags if getattr(arguments.training, name, False)]:
        lines.append(f"auto-fit: the plan does not count what {' and '.join(uncounted)} would change")
    if arguments.one_pass_loss:
        lines.append("auto-fit: --one_pass_loss true: losses equal TRL's to rounding (with a head that is not trained)")
    if kept:
        lines.append(f"auto-fit: kept as given: {' and '.join(kept)}")
    if wanted.micro_batch is not None and arguments.tune.effective_batch is None:
        lines.append(
            f"auto-fit: to have them chosen, give --effective_batch {wanted.effective_batch} instead of "
            "--per_device_train_batch_size and --gradient_accumulation_steps"
        )
    return lines


def _outcome(trial: Trial) -> str:
    if trial.measured is None:
        return "it fits" if trial.fits else "out of memory"
    measured = f"{_gib(trial.measured)} GiB at the peak ({_gib(trial.candidate.predicted)} predicted)"
    return f"it fits, {measured}" if trial.fits else f"too little memory left, {measured}"


def _same(candidate: Candidate, choice: Choice) -> bool:
    names = ("micro_batch", "checkpointing", "recompute")
    return all(getattr(candidate, name) == getattr(choice, name) for name in names)


def _advice(training: Any) -> str:
    return f"lower --max_length (it is {training.max_length}), add --load_in_4bit, or see `hf-rocm-tune plan`"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"


# ---- one model over several cards -------------------------------------------------------------------------------


def make_mover(arguments: Arguments, source: ModelSource, *, say: Say) -> Mover:
    """The mover of a run, for one device or for the cards of a split.

    Raises:
        UsageError: the split is not possible, with the reason.
    """
    training, tune, text = arguments.training, arguments.tune, arguments.ranks.split_layers
    settings = TransferSettings(verify=tune.verify, on_corruption=tune.on_corruption)
    faults = FaultSpec.from_environment()
    if text is None:
        return Mover(training.device, settings=settings, faults=faults)
    given = parse(text)
    config = _config(source)
    stack, layers = stack_of(config, trust_remote_code=source.trust_remote_code)
    wanted = counts_for(given, layers) if given else None
    devices = _devices(training.device, len(wanted) if wanted else None, layers)
    training._n_gpu = 1  # with several cards visible transformers would count a batch for each of them
    counts = _planned_counts(arguments, config, devices, wanted, layers, say)
    return SplitMover(Split(stack, counts), devices, settings=settings, faults=faults)


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
        raise UsageError(f"{FLAG}: {layers} layers cannot be distributed over {cards} cards")
    return [first] * cards if first.type != "cuda" else [torch.device("cuda", index) for index in range(cards)]


def _planned_counts(
    arguments: Arguments,
    config: Any,
    devices: Sequence[torch.device],
    wanted: tuple[int, ...] | None,
    layers: int,
    say: Say,
) -> tuple[int, ...]:
    """The number of layers on each card; prints the planned memory of each."""
    cards = [memory_of(device) for device in devices]
    logical = devices[0].type != "cuda"
    try:
        request = replace(
            from_training(arguments.resolved(), platform=_platform(devices[0])),
            micro_batch=arguments.training.per_device_train_batch_size,
            checkpointing=bool(arguments.training.activation_checkpointing),
        )
        flights = IN_FLIGHT * len(cards) if arguments.ranks.pipeline == "auto" else 1
        plan = split_plan(request, cards=cards, counts=wanted, config=config, flights=flights)
    except UsageError as error:
        counts = wanted or even_counts(layers, [card.free for card in cards])
        say(f"split: {_shared(counts)}; the memory of each card could not be planned ({error})")
        return counts
    counts = plan.counts
    how = "as given" if wanted else "balanced by memory"
    where = f"{len(devices)} logical cards on the CPU" if logical else f"{len(devices)} cards"
    say(f"split: {_shared(counts)} on {where}, {how}; transfers between them are staged through the host, verified")
    if (flights := plan.estimates[0].case.flights) > 1:
        say(f"split: planned with the activations of {flights} micro-batches in flight")
    for line in memory_lines(plan):
        say(f"split: planned {line}")
    if not logical and not plan.fits:
        say("split: by this plan it does not fit; `hf-rocm-tune plan --split` searches for settings that do")
    return counts


def memory_of(device: torch.device) -> CardMemory:
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
