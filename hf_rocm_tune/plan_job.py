"""Planning: joins measured shapes (``models``) with the arithmetic of memory (``memory``) and the card (``hardware``).

    plan = plan_for(PlanRequest(model="Qwen/Qwen3-8B"), card=card_named("rx7900xt"))
    plan.choice.estimate.case.micro_batch, plan.choice.estimate.case.checkpointing

Nothing is downloaded but a configuration, nothing is allocated, no GPU is needed. The layers of the model are recorded
on the meta device when a case first asks for them, a few of them at two lengths and two batch sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.memory.plan import CardMemory, Case, Estimate, Variant, estimate
from hf_rocm_tune.memory.plan_choice import LENGTH_STEP, Option, fastest, longest, micro_batches, nearest, option
from hf_rocm_tune.memory.plan_host import Host, host
from hf_rocm_tune.memory.plan_models import PUBLIC_MODELS, public_model
from hf_rocm_tune.memory.plan_optimizers import optimizer
from hf_rocm_tune.plan_beside import at_once
from hf_rocm_tune.plan_recordings import Kept, Recordings
from hf_rocm_tune.plan_request import PlanRequest

#: Longer sequences are not considered when the configuration sets no limit.
LONGEST = 131072


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Args:
        request: the question.
        architecture: name of the model's class.
        parameters: of the model.
        layers: of the model.
        card: the memory that is planned for.
        grid: every case that was considered, other lengths included.
        choice: the fastest that fits, at the wanted length and effective batch; None where none does.
        variants: by method, for what else one may ask.
        limit: tokens that the model was made for, or None.
        scales: whether the step is known at other lengths than the wanted one.
        notes: what a reader should know.
        found_longest: by method, what ``longest`` has said already.
    """

    request: PlanRequest
    architecture: str
    parameters: int
    layers: int
    card: CardMemory
    grid: tuple[Option, ...]
    choice: Option | None
    variants: dict[str, Variant]
    limit: int | None
    scales: bool
    notes: tuple[str, ...]
    found_longest: dict[str, int | None] = field(default_factory=dict)

    @property
    def nearest(self) -> Option:
        """The choice, or where nothing fits the case that needs least."""
        return self.choice or nearest([each for each in self.grid if each.estimate.case.length == self.request.length])

    def host(self) -> Host:
        """What the chosen case takes of the host's memory."""
        found = self.nearest.estimate
        return host(self.variants[found.variant], found, workers=self.request.workers)

    def longest(self, method: str) -> int | None:
        """The longest sequence that fits with micro-batch 1 and checkpointing, in steps of 128 tokens; None: none.

        The last step is recorded at that very length, because attention may change its ways on the road to it. None
        also where the step does not scale, and each length would have to be recorded.
        """
        if method not in self.found_longest:
            self.found_longest[method] = self._find_longest(method)
        return self.found_longest[method]

    def _find_longest(self, method: str) -> int | None:
        variant = self.variants[method]
        if not self.scales or sum(variant.weights.parts.values()) > self.card.free:
            return None
        exact = replace(variant, trace=variant.exact)

        def at(length: int) -> Estimate:
            case = Case(
                micro_batch=1,
                length=length,
                checkpointing=variant.can_checkpoint,
                packing=self.request.packing,
                accumulation=self.request.each,
                cards=self.request.cards,
            )
            return estimate(variant, case, self.card)

        found = longest(at, limit=self.limit or LONGEST)
        while found and not estimate(exact, at(found).case, self.card).fits:
            found = longest(at, limit=found - LENGTH_STEP) if found > LENGTH_STEP else None
        return found


def plan_for(
    request: PlanRequest,
    *,
    card: CardMemory,
    config: Any = None,
    grid: bool = True,
    within_limit: bool = False,
    at_once: bool = False,
) -> Plan:
    """Plans a training job.

    Args:
        request: the question.
        card: the memory of the card, from :func:`hf_rocm_tune.plan_card.card_named` or ``CardMemory(...)``.
        config: the model's configuration where it is at hand; else ``request.model`` is asked for it.
        grid: consider half and twice the length as well; auto-fit does not need them.
        within_limit: where the model was made for fewer tokens than wanted, plan for those.
        at_once: record several methods at once, in forked processes; see ``plan_beside.worthwhile``.

    Returns:
        The plan. Its ``choice`` is the fastest case by estimate that fits, for the wanted effective batch exactly. Its
        ``request`` is the question with what was settled on the way.

    Raises:
        UsageError: the configuration cannot be read, or this model cannot be planned.
    """
    notes: list[str] = []
    if config is None:
        config, remark = _config(request)
        notes += remark
    from hf_rocm_tune.models.shapes_config import longest_position

    limit = longest_position(config)
    question = _Question(card=card, config=config, limit=limit, grid=grid, at_once=at_once)
    if limit is None or request.length <= limit:
        return question.answer(request, notes)
    if within_limit:
        notes.append(f"the model was made for {limit} tokens, so they are planned, not {request.length}")
        return question.answer(replace(request, length=limit), notes)
    notes.append(f"the model was made for {limit} tokens; {request.length} are more")
    try:
        return question.answer(request, notes)
    except UsageError as error:
        raise UsageError(f"{error}; it was made for {limit} tokens, and {request.length} are more") from error


@dataclass(frozen=True, kw_only=True)
class _Alone:
    """What the plan of one method has found that serves that of several."""

    kept: Kept
    longest: int | None


@dataclass(frozen=True, kw_only=True)
class _Question:
    """What stays the same whichever methods are asked for; the fields are those of `plan_for`."""

    card: CardMemory
    config: Any
    limit: int | None
    grid: bool
    at_once: bool

    def answer(self, request: PlanRequest, notes: list[str]) -> Plan:
        """The plan of these methods, with the notes so far; raises as `plan_for` does."""
        known = self._known(request) if self.at_once and len(request.methods) > 1 else {}
        lengths = _lengths(request, self.limit) if self.grid else (request.length,)
        request, recordings, remarks = self._recordings(request, lengths, known)
        notes = notes + remarks
        if fixed := any(each.fixed_length for each in recordings.values()):
            lengths = (request.length,)
            notes.append("its step does other things at each length, or is long: only the wanted length was planned")
        variants = {
            method: Variant(
                name=method,
                weights=each.weights(),
                trace=each,
                exact=each.exact,
                optimizer=optimizer(request.optim, on_cpu=request.platform == "cpu"),
                can_checkpoint=each.facts.can_checkpoint,
            )
            for method, each in recordings.items()
        }
        options = tuple(_options(request, self.card, variants, lengths))
        facts = [each.facts for each in recordings.values()]
        return Plan(
            request=request,
            architecture=facts[0].architecture,
            parameters=next(iter(variants.values())).weights.parameters,
            layers=len(facts[0].layer_of),
            card=self.card,
            grid=options,
            choice=fastest(each for each in options if each.estimate.case.length == request.length),
            variants=variants,
            limit=self.limit,
            scales=not fixed,
            notes=(*notes, *dict.fromkeys(note for each in facts for note in each.notes)),
            found_longest={} if fixed else {m: each.longest for m, each in known.items() if isinstance(each, _Alone)},
        )

    def _known(self, request: PlanRequest) -> dict[str, _Alone | UsageError]:
        """By method, what was recorded for a plan of it alone, or why that could not be; all at once."""

        def alone(method: str) -> _Alone | UsageError:
            try:
                plan = replace(self, at_once=False).answer(replace(request, methods=(method,)), [])
            except UsageError as error:
                return error
            recordings = plan.variants[method].trace
            assert isinstance(recordings, Recordings)
            return _Alone(kept=recordings.kept(), longest=plan.longest(method))

        return at_once(alone, request.methods)

    def _recordings(
        self, request: PlanRequest, lengths: tuple[int, ...], known: Mapping[str, _Alone | UsageError]
    ) -> tuple[PlanRequest, dict[str, Recordings], list[str]]:
        """The question with its dropout settled, what can be recorded, by method, and why something cannot be.

        Raises:
            UsageError: nothing can be recorded.
        """
        found, refused = self._recorded(request, lengths, known)
        remarks: list[str] = []
        refuses_dropout = any("dropout" in str(reason) for reason in refused.values())
        if not found and request.dropout is None and refuses_dropout:
            request = replace(request, dropout=0.0)
            found, refused = self._recorded(request, lengths, known)
            remarks.append("without dropout, because PEFT refuses it for these adapters: --dropout 0")
        if not found:
            raise next(iter(refused.values()))
        return request, found, remarks + [f"{method}: {reason}" for method, reason in refused.items()]

    def _recorded(
        self, request: PlanRequest, lengths: tuple[int, ...], known: Mapping[str, _Alone | UsageError]
    ) -> tuple[dict[str, Recordings], dict[str, UsageError]]:
        """By method, what can be recorded, and why something cannot be; no further one where the steps are too long."""
        from hf_rocm_tune.models.shapes_record import TooManyOperations

        found: dict[str, Recordings] = {}
        refused: dict[str, UsageError] = {}
        for method in request.methods:
            recordings = Recordings(self.config, request, method, lengths)
            try:
                earlier = known.get(method)
                if isinstance(earlier, UsageError):
                    raise earlier
                if earlier is not None:
                    recordings.adopt(earlier.kept)
                elif long := next(
                    (name for name, each in found.items() if each.takes_long and each.fixed_length), None
                ):
                    raise UsageError(
                        f"not planned beside {long}, because it takes long to record a step of this model; "
                        f"--method {method} plans it"
                    )
                recordings.weights()
                found[method] = recordings
            except TooManyOperations as error:
                refused[method] = error
                break
            except UsageError as error:
                refused[method] = error
        return found, refused


def largest_models(request: PlanRequest, *, card: CardMemory) -> dict[str, str | None]:
    """By method, the largest public model of which one sequence fits, checkpointed; None where none does."""
    found: dict[str, str | None] = {}
    for method in request.methods:
        found[method] = None
        for model in sorted(PUBLIC_MODELS, key=lambda each: -each.billions):
            single = replace(request, methods=(method,), micro_batch=1, checkpointing=True)
            from hf_rocm_tune.models.shapes_config import config_of

            if plan_for(single, card=card, config=config_of(model.fields), grid=False).choice is not None:
                found[method] = model.name
                break
    return found


def _config(request: PlanRequest) -> tuple[Any, list[str]]:
    """The configuration of the model, or that of its entry in our table where it cannot be read."""
    from hf_rocm_tune.models.shapes_config import config_of, load_config

    known = public_model(request.model)
    try:
        loaded = load_config(request.model, revision=request.revision, trust_remote_code=request.trust_remote_code)
        return loaded, []
    except UsageError:
        if known is None:
            raise
    return config_of(known.fields), [f"its configuration could not be read; planned by the known shape of {known.name}"]


def _lengths(request: PlanRequest, limit: int | None) -> tuple[int, ...]:
    """Half, once and twice the wanted length, as far as the model goes."""
    wanted = {max(2, request.length // 2), request.length, 2 * request.length}
    return tuple(sorted(each for each in wanted if each <= max(limit or LONGEST, request.length)))


def _options(
    request: PlanRequest, card: CardMemory, variants: dict[str, Variant], lengths: tuple[int, ...]
) -> Iterator[Option]:
    sizes = (request.micro_batch,) if request.micro_batch else micro_batches(request.effective_batch, request.cards)
    for variant in variants.values():
        possible = (False, True) if variant.can_checkpoint else (False,)
        ways = [way for way in possible if request.checkpointing in (None, way)]
        if not ways:
            raise UsageError("this architecture does not support checkpointing: leave it off")
        for length in lengths:
            for checkpointing in ways:
                for micro_batch in sizes:
                    yield option(
                        variant,
                        card,
                        micro_batch=micro_batch,
                        length=length,
                        checkpointing=checkpointing,
                        effective_batch=request.effective_batch,
                        cards=request.cards,
                        packing=request.packing,
                    )
