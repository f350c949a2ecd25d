"""The grid of a job: its cases, from the smallest micro-batch up, each with its estimate.

A case is a micro-batch size, with or without checkpointing (all layers recompute their activations), as a mix of layers
that recompute and layers that do not, or with layers streamed from host memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.streamed import AUTO, FLAG
from hf_rocm_tune.plan.estimate import CardMemory, Case, Estimate, Variant, estimate
from hf_rocm_tune.plan.recordings import Recordings
from hf_rocm_tune.plan.request import EmbeddingsWrittenError, PlanRequest


def case_of(request: PlanRequest, micro_batch: int, length: int) -> Case:
    """The case of a micro-batch size and a row length in tokens, with checkpointing."""
    return Case(
        micro_batch=micro_batch,
        length=length,
        checkpointing=True,
        packing=request.packing,
        accumulation=max(1, request.per_card // micro_batch),
        cards=request.cards,
        trainer=request.trainer,
        eval_batch=request.eval_batch,
    )


def grid_of(
    recordings: Recordings, card: CardMemory, request: PlanRequest, *, all_sizes: bool = True
) -> list[Estimate]:
    """The estimates of all cases that the request leaves open.

    Args:
        recordings: of the method.
        card: the memory that is planned for.
        request: what is asked for; where it names a setting, only that is estimated.
        all_sizes: estimate also micro-batches larger than one that cannot fit; recording them takes time.

    Raises:
        UsageError: this model does not support a setting that is asked for, or cannot be planned.
    """
    cases = [case_of(request, size, request.length) for size in _micro_batches(request)]
    settings = _checkpointing_settings(recordings, request)
    if request.recompute is not None:
        return _with_mix(recordings, card, cases, request.recompute)
    try:
        grid = _without_streaming(recordings, card, request, cases, settings, all_sizes=all_sizes)
    except EmbeddingsWrittenError:  # only a recording with checkpointing shows it: such a model is planned without
        recordings.can_checkpoint = False
        settings = _checkpointing_settings(recordings, request)
        grid = _without_streaming(recordings, card, request, cases, settings, all_sizes=all_sizes)
    if not request.stream:
        return grid
    some_case_fits = any(option.fits for option in grid)
    if request.stream == AUTO and some_case_fits:
        return grid
    return _with_streaming(recordings, card, grid, request.stream)


def _micro_batches(request: PlanRequest) -> list[int]:
    """The micro-batch sizes to plan: the one that is asked for, or all that divide the rows of a card."""
    sizes: Iterable[int] = range(1, request.per_card + 1)
    if request.micro_batch:
        sizes = [request.micro_batch]
    smallest = 1
    if request.trainer == "kto":  # its KL estimate pairs rows
        smallest = 2
    return [size for size in sizes if size >= smallest and request.per_card % size == 0]


def _checkpointing_settings(recordings: Recordings, request: PlanRequest) -> list[bool]:
    """Without checkpointing, with it, or both: what is asked for, where the architecture supports it."""
    settings = [False, True]
    if request.checkpointing is not None:
        settings = [request.checkpointing]
    if not recordings.can_checkpoint:
        settings = [checkpointing for checkpointing in settings if not checkpointing]
    if not settings:
        raise UsageError("this architecture does not support checkpointing: leave it off")
    return settings


def _with_mix(
    recordings: Recordings, card: CardMemory, cases: Sequence[Case], recompute: tuple[int, int]
) -> list[Estimate]:
    """The cases with a given mix: ``recompute``: layers that recompute wholly, and layers that do so selectively."""
    from hf_rocm_tune.models.recompute import check

    layers = len(recordings.sample.layer_of)
    check(recompute, layers if recordings.mixes else 0)
    return [estimate(recordings.variant, replace(case, recompute=recompute), card) for case in cases]


# ---- all layers on the card -----------------------------------------------------------------------------------------


def _without_streaming(
    recordings: Recordings,
    card: CardMemory,
    request: PlanRequest,
    cases: Sequence[Case],
    settings: Sequence[bool],
    *,
    all_sizes: bool,
) -> list[Estimate]:
    """The cases with these settings of checkpointing, and their best mixes. ``cases``: the smallest first."""
    variant = recordings.variant
    may_mix = request.mixes and request.checkpointing is None
    grid: list[Estimate] = []
    for case in cases:
        by_checkpointing: dict[bool, Estimate] = {}
        try:
            for checkpointing in settings:
                by_checkpointing[checkpointing] = estimate(variant, replace(case, checkpointing=checkpointing), card)
        except UsageError:
            if grid and request.pictures:  # the windows of so many pictures take too many operations to be recorded
                break
            raise
        grid += by_checkpointing.values()
        if may_mix and True in by_checkpointing:
            mix = _best_mix(recordings, card, case, by_checkpointing)
            if mix is not None:
                grid.append(mix)
        if not all_sizes:
            settings = _settings_for_larger(by_checkpointing, variant, streams=bool(request.stream))
    return grid


def _settings_for_larger(by_checkpointing: Mapping[bool, Estimate], variant: Variant, *, streams: bool) -> list[bool]:
    """The settings of checkpointing with which a larger micro-batch may fit.

    ``streams``: with checkpointing all sizes are needed, however far they are from fitting: streaming starts from them.
    """
    settings = []
    for checkpointing, option in by_checkpointing.items():
        is_needed = checkpointing and streams
        if is_needed or _may_larger_fit(option, variant):
            settings.append(checkpointing)
    return settings


def _may_larger_fit(option: Estimate, variant: Variant) -> bool:
    """Whether a larger micro-batch than this one may fit.

    It takes more memory for all but gradients, which it may save: a step of one micro-batch accumulates none. So where
    more is missing than all gradients take, no larger one fits.
    """
    missing_bytes = -option.spare
    return missing_bytes <= variant.weights.gradients


# ---- a mix of layers that recompute and layers that do not ----------------------------------------------------------


def _best_mix(
    recordings: Recordings, card: CardMemory, case: Case, by_checkpointing: Mapping[bool, Estimate]
) -> Estimate | None:
    """The fastest mix between no layer that recomputes and all of them; None where a mix is of no use.

    ``by_checkpointing``: the case's estimates; without checkpointing there is none where it is known not to fit.
    """
    free_bytes = _bytes_left_by_mix(card, by_checkpointing.get(False), by_checkpointing[True])
    if free_bytes is None or not recordings.mixes:
        return None
    return _fastest_mix(recordings, card, case, free_bytes)


def _bytes_left_by_mix(card: CardMemory, kept: Estimate | None, recomputed: Estimate) -> float | None:
    """How many bytes of the card a mix should leave free; None: a mix is of no use.

    `CardMemory.rooms` has the amounts that should be left, the best first. A mix is of use for an amount that is left
    if all layers recompute, and is not if none does.

    Args:
        card: the memory that is planned for.
        kept: the case in which no layer recomputes; None: it is known not to fit.
        recomputed: the case in which all layers recompute.
    """
    for free_bytes in card.rooms:
        is_left_by_recomputing = recomputed.spare >= free_bytes
        is_left_anyway = kept is not None and kept.spare >= free_bytes
        if is_left_by_recomputing and not is_left_anyway:
            return free_bytes
    return None


def _fastest_mix(recordings: Recordings, card: CardMemory, case: Case, free_bytes: float) -> Estimate | None:
    """The fastest mix that leaves so many bytes of the card free; None: none does.

    For each number of layers that recompute wholly, the fewest that recompute selectively are searched for. With more
    of the former no more of the latter are needed: so the search starts from the number before.
    """
    layers = len(recordings.sample.layer_of)
    fastest: Estimate | None = None
    selective = layers
    for whole in range(layers):
        selective = min(selective, layers - whole)
        mix = _with_fewest_selective(recordings.variant, card, case, whole, selective, free_bytes)
        if mix is None:
            continue
        assert mix.case.recompute is not None
        _, selective = mix.case.recompute
        if fastest is None or mix.tokens_per_second >= fastest.tokens_per_second:
            fastest = mix
    return fastest


def _with_fewest_selective(
    variant: Variant, card: CardMemory, case: Case, whole: int, most_selective: int, free_bytes: float
) -> Estimate | None:
    """The mix of ``whole`` layers with the fewest selective ones that leaves so many bytes free; None: none does."""
    fewest: Estimate | None = None
    for selective in range(most_selective, -1, -1):
        if whole + selective == 0:  # no layer recomputes
            break
        mix = estimate(variant, replace(case, recompute=(whole, selective)), card)
        if mix.spare < free_bytes:
            break
        fewest = mix
    return fewest


# ---- layers streamed from host memory -------------------------------------------------------------------------------


def _with_streaming(recordings: Recordings, card: CardMemory, grid: Sequence[Estimate], count: int) -> list[Estimate]:
    """The grid's cases with checkpointing in all layers, ``count`` of them streamed; `AUTO`: as few as are needed."""
    if recordings.sample.is_one_layer:
        name = type(recordings.sample.base).__name__
        raise UsageError(f"{FLAG}: cannot identify the decoder layers of {name}; leave the flag out")
    streamed = []
    for option in grid:
        case = option.case
        if not case.checkpointing or case.recompute is not None:
            continue
        if count == AUTO:
            streamed.append(_with_fewest_streamed(recordings.variant, card, case))
        else:
            streamed.append(estimate(recordings.variant, replace(case, streamed=count), card))
    return streamed


def _with_fewest_streamed(variant: Variant, card: CardMemory, case: Case) -> Estimate:
    """The case with as few layers streamed as leave the card's room; or its margin, if the host lacks the memory."""
    layers = len(variant.weights.streams)

    def with_streamed(count: int) -> Estimate:
        return estimate(variant, replace(case, streamed=count), card)

    def with_fewest_that_leave(free_bytes: float) -> Estimate:
        counts = range(1, layers + 1)  # more layers in host memory leave more of the card
        position = bisect_left(counts, True, key=lambda count: with_streamed(count).spare >= free_bytes)
        return with_streamed(min(layers, 1 + position))

    option = with_fewest_that_leave(card.room)
    if option.roomy and not option.host_missing:
        return option
    return with_fewest_that_leave(card.margin)
