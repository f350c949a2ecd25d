"""Memory and time of a training step on a card: arithmetic on recorded shapes. Imports no torch.

A model of L layers is the recorded segments (`recorder`) in order, each layer's as often as the model has such a
layer. The peak is the highest of several moments, never the sum of all allocations. Speed only compares choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hf_rocm_tune.models.streamed import LAYER_BUFFERS_A_CARD, spread

Floats: TypeAlias = "npt.NDArray[np.float64]"
Counts: TypeAlias = "tuple[int, ...]"
#: The change, the highest level and the new gradients of each segment, in bytes, by its role and layer.
Levels: TypeAlias = "dict[tuple[str, int], Floats]"
T = TypeVar("T")

GIB = 1 << 30
# Assumed, not measured on a 7900 XT:
CONTEXT_BYTES = GIB // 2  # of the runtime before the first tensor, kernels and workspaces included
DESKTOP_BYTES = GIB  # of a desktop session on the card
SLACK_SHARE = 0.05  # of temporary memory: what the caching allocator cannot reuse
SLACK_FLOOR = GIB // 10  # the least of it
#: A case that leaves less is called tight. Reserved minus allocated memory plus the context was 0.5 to 1.8 GiB on T4s
#: (fitcheck), the context alone 612 MiB on a B200 (unsloth#8669), more than is assumed here.
TIGHT = 7 * GIB // 10
#: A choice that leaves so much is preferred until an AMD card has run a plan's choice: the context and the allocator's
#: slack are assumed, and peaks were compared with published figures only. Never a condition of fitting.
ROOM = 2 * GIB
#: Assumed: bytes a second from host memory to the card over PCIe 4.0 x8, the link of two cards on most AM5 boards, each
#: byte packed by the processor before; on x16, 28 to 29e9 were measured (ROCm/ROCm#2253).
LINK = 13e9
MOVED_PER_WRITTEN = 3.0  # bytes: an operation reads about twice what it writes
LAUNCH = 10e-6  # assumed: seconds of a kernel launch, Python's share included
BANDWIDTH_SHARE = 0.8  # assumed: of the data sheet's bandwidth, what a kernel reaches
#: Estimates of speed that differ by less count as equal; their bounds are far wider (`Rates`).
NEAR = 0.05
#: A mix of recomputation fills the card; it must be estimated to be faster than what else fits by this share.
MIX_GAIN = 0.15
#: By how much of the highest level a step may differ from the same tokens in shorter rows, see `ShortRows`.
SHORT_ROWS_ERROR = 0.25
#: In order of time. Of an evaluation, only the first three; the ``reference`` pass is that of DPO and KTO.
ROLES = ("start", "forward", "head", "reference start", "reference", "reference head", "loss", "backward", "end")
_OF_LAYERS = ("forward", "reference", "backward")
WORK = ("flops", "written", "launches", "products", "unpacked")


@dataclass(kw_only=True)
class TapeSegment:
    role: str  # of `ROLES`: ``start``: embeddings and masks; ``head``: last norm, head, loss; ``loss``: their backward
    layer: int = -1  # position among the recorded layers; -1: none
    flops: int = 0  # floating point operations of its matrix products
    # bytes of its new tensors, except those that have rates of their own (products, dequantisation) or are read at once
    written: int = 0
    launches: int = 0  # operations with a new tensor
    products: int = 0  # of those, matrix products and attention
    unpacked: int = 0  # elements of 4-bit weights that were dequantised


@dataclass(kw_only=True)
class Tape:
    """The recording of one step of a model with few layers, in order of time: memory and work of each segment."""

    segments: list[TapeSegment] = field(default_factory=list)  # one for each pair of role and layer
    # segment, storage, and +1 allocated, -1 freed, 0 became a parameter's gradient
    events: list[tuple[int, int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes of each storage
    owners: list[int] = field(default_factory=list)  # segment in which each storage was allocated

    @cached_property
    def keys(self) -> list[tuple[str, int]]:
        return [(segment.role, segment.layer) for segment in self.segments]

    @property
    def layers(self) -> int:
        return 1 + max(layer for _, layer in self.keys)

    @cached_property
    def _columns(self) -> tuple[Any, ...]:
        """Of each event: its segment, its sign, and the storage's size and owner."""
        segments, storages, signs = np.array(self.events, dtype=np.int64).T
        sizes = np.array(self.sizes, dtype=np.float64)
        owners = np.array(self.owners)
        return segments, signs, sizes[storages], owners[storages]

    @cached_property
    def dropped(self) -> float:
        """Bytes of masks that are freed between the forward and the backward pass of the last layer."""
        segments, signs, sizes, owners = self._columns
        roles = np.array([role for role, _ in self.keys])
        layers = np.array([layer for _, layer in self.keys])
        freed_between = (signs < 0) & np.isin(roles[segments], ("head", "loss"))
        of_masks = roles[owners] == "start"
        # what has the size of a layer's tensors may be its input, which backward needs
        may_be_input = np.isin(sizes, sizes[layers[segments] >= 0])
        return float(sizes[freed_between & of_masks & ~may_be_input].sum())

    @cached_property
    def _events_of(self) -> list[tuple[Any, Any, Any]]:
        """Of each segment its events: their signs, the storages' sizes, and the layers of their owners."""
        segments, signs, sizes, owners = self._columns
        layers = np.array([layer for _, layer in self.keys])
        # events are in order of time
        edges = [int(np.searchsorted(segments, number)) for number in range(len(self.keys) + 1)]
        events = []
        for start, stop in pairwise(edges):
            own = slice(start, stop)
            events.append((signs[own], sizes[own], layers[owners[own]]))
        return events

    @cached_property
    def _levels_of_layers(self) -> dict[bool, Levels]:
        """The levels of the layers' segments, which are the same however often a layer is there, by whether gradients
        accumulate."""
        alone: Levels = {}
        accumulated: Levels = {}
        for (role, layer), (signs, sizes, _) in zip(self.keys, self._events_of, strict=True):
            if layer >= 0:
                alone[role, layer] = _level(signs, sizes, accumulating=False)
                accumulated[role, layer] = _level(signs, sizes, accumulating=True)
        return {False: alone, True: accumulated}

    def levels(self, times: Floats, *, accumulating: bool) -> Levels:
        """The change, the highest level and the new gradients of each segment, in bytes.

        ``times``: how often a storage is there, by the recorded layer that allocated it (at the end, all others). It
        counts outside the layers: a cache of casts that they fill is freed by one segment, for every real layer.
        """
        levels = dict(self._levels_of_layers[accumulating])
        for (role, layer), (signs, sizes, owners) in zip(self.keys, self._events_of, strict=True):
            if layer < 0:
                levels[role, layer] = _level(signs, sizes * times[owners], accumulating=accumulating)
        return levels

    def work(self, times: Floats) -> Floats:
        """The sums over the segments, in the order of `WORK`."""
        rows = []
        for name in WORK:
            rows.append([getattr(segment, name) * times[segment.layer] for segment in self.segments])
        return np.array(rows, dtype=np.float64).sum(axis=1)


@dataclass(frozen=True, kw_only=True)
class ShortRows:
    """A step of rows that are too long to be recorded, from recordings of as many tokens in shorter rows.

    Code that loops over the tokens of a row takes a launch for each, but its memory depends on how many tokens there
    are in all. Each figure of a step is taken as a sum of three terms: one that depends on the tokens alone, one that
    grows with their length (masks), one with the number of rows (the states that a row begins with). Three recordings
    give the three terms, exactly where no other moment becomes the highest.
    """

    tapes: Mapping[int, Tape]  # three, by the length of their rows
    length: int  # of the rows that are planned

    @property
    def is_plausible(self) -> bool:
        """Whether the planned rows take about as much memory as the longest recorded ones."""
        longest = self._longest
        if any(tape.keys != longest.keys for tape in self.tapes.values()):
            return False
        once = np.ones(1 + longest.layers)
        recorded = longest.levels(once, accumulating=False)
        planned = self.levels(once, accumulating=False)
        highest = max(level[1] for level in recorded.values())
        for (role, layer), level in recorded.items():
            if role == "end":  # what it frees has no part in the peak
                continue
            if np.abs(planned[role, layer] - level).max() > SHORT_ROWS_ERROR * highest:
                return False
        return True

    @cached_property
    def _shares(self) -> Floats:
        """By how much each recording is multiplied; these products add up to the planned step."""
        lengths = np.array(list(self.tapes), dtype=np.float64)
        terms = np.array([np.ones_like(lengths), lengths, 1 / lengths])
        return np.linalg.solve(terms, np.array([1.0, self.length, 1 / self.length]))

    @property
    def _longest(self) -> Tape:
        return self.tapes[max(self.tapes)]

    @property
    def keys(self) -> list[tuple[str, int]]:
        return self._longest.keys

    @property
    def layers(self) -> int:
        return self._longest.layers

    @property
    def events(self) -> list[tuple[int, int, int]]:
        return self._longest.events

    @property
    def dropped(self) -> float:
        """As of `Tape`."""
        return float(self._shares @ np.array([tape.dropped for tape in self.tapes.values()]))

    def levels(self, times: Floats, *, accumulating: bool) -> Levels:
        """As of `Tape`."""
        of_tapes = [tape.levels(times, accumulating=accumulating) for tape in self.tapes.values()]
        levels: Levels = {}
        for key in self.keys:
            levels[key] = self._shares @ np.array([of_tape[key] for of_tape in of_tapes])
        return levels

    def work(self, times: Floats) -> Floats:
        """As of `Tape`."""
        rows: Floats = self._shares @ np.array([tape.work(times) for tape in self.tapes.values()])
        return rows


Recorded: TypeAlias = Tape | ShortRows


def _level(signs: Any, sizes: Floats, *, accumulating: bool) -> Floats:
    """The change, the highest level and the new gradients of a segment, in bytes.

    ``signs``: of its events, see `Tape.events`; ``accumulating``: a new gradient is freed once it is added to another.
    """
    changes = sizes * signs
    gradients = np.where(signs == 0, sizes, 0.0)
    rises = changes
    if accumulating:
        rises = changes - gradients
    return np.array([changes.sum(), np.cumsum(rises).max(initial=0.0), gradients.sum()])


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The highest level of a step, in bytes above the level before it."""

    total: float
    kept: float  # activations kept for backward at the start of the segment in which it is reached
    most_kept: float  # the most kept at the start of any segment: what a concurrent micro-batch holds, masks included
    gradients: float  # of parameters at the start of that segment
    by_role: dict[str, float]  # the highest level in each kind of segment
    all_gradients: float  # at the end of the step


@dataclass(frozen=True)
class Step:
    """A step of the real model: runs of layers, each recorded with one kind of recomputation.

    The segments outside the layers are those of the first recording.
    """

    runs: tuple[tuple[Recorded, Counts], ...]  # for each real layer the index of the recorded one
    layers_only: bool = False  # of a card that has layers of a split model and copies of their inputs only

    @property
    def layers(self) -> int:
        return sum(len(layer_of) for _, layer_of in self.runs)

    def part(self, start: int, stop: int) -> Step:
        """The step on a card of a split model: its layers and, if it is the first, all other segments."""
        runs = []
        before = 0
        for tape, layer_of in self.runs:
            own = layer_of[max(start - before, 0) : max(stop - before, 0)]
            if own:
                runs.append((tape, own))
            before += len(layer_of)
        return Step(tuple(runs), self.layers_only or start > 0)

    @cached_property
    def _times(self) -> list[Floats]:
        """For each run the number of each recorded layer, and 1 or 0 for the segments outside the layers."""
        times = []
        for number, (tape, layer_of) in enumerate(self.runs):
            of_layers = [layer_of.count(layer) for layer in range(tape.layers)]
            outside = 1 if number == 0 else 0
            times.append(np.array([*of_layers, outside], dtype=np.float64))
        return times

    def peak(self, *, accumulating: bool = False) -> Peak:
        """The peak of the step; ``accumulating``: new gradients are added to those of earlier micro-batches."""
        first_tape = self.runs[0][0]
        of_runs: list[Levels] = []
        for (tape, _), times in zip(self.runs, self._times, strict=True):
            of_runs.append(tape.levels(times, accumulating=accumulating))
        outside = _outside_the_layers(of_runs)
        roles: list[str] = []  # of the segments of the real model, in order of time
        rows: list[Floats] = []  # their levels
        for role in ROLES:
            if role in _OF_LAYERS:
                levels = self._in_every_layer(role, of_runs)
            elif role in outside and not self.layers_only:
                levels = [outside[role]]
            else:
                levels = []
            rows += levels
            roles += [role] * len(levels)
        change, highest, new_gradients = np.array(rows).T
        start = 0.0
        if self.layers_only:
            # a card with layers only has copies of the results of embeddings and masks, which go with those of the
            # first card: its own segments free them
            start = max(0.0, outside["start"][0])
        activations = change - new_gradients
        kept = start + np.cumsum(activations) - activations
        most_kept = kept.max()  # one that waits between its passes for another card still has its masks
        if self.layers_only:
            kept -= np.array([first_tape.dropped if role == "backward" else 0.0 for role in roles])
        all_gradients = float(new_gradients.sum())
        if accumulating:
            gradients = np.full_like(new_gradients, all_gradients)
        else:
            gradients = np.cumsum(new_gradients) - new_gradients
        level = kept + gradients + highest
        by_role: dict[str, float] = {}
        for role, reached in zip(roles, level.tolist(), strict=True):
            by_role[role] = max(reached, by_role.get(role, reached))
        at = level.argmax()
        return Peak(
            total=float(level[at]),
            kept=float(kept[at]),
            most_kept=float(most_kept),
            gradients=float(gradients[at]),
            by_role=by_role,
            all_gradients=all_gradients,
        )

    def _in_every_layer(self, role: str, of_runs: Sequence[Levels]) -> list[Floats]:
        """The levels of every real layer in this role, in order of time; empty: the step has no such pass."""
        if not any(role == recorded for levels in of_runs for recorded, _ in levels):
            return []
        nothing = np.zeros(3)  # a layer of which nothing needs a gradient
        layers = []
        for levels, (_, layer_of) in zip(of_runs, self.runs, strict=True):
            layers += [levels.get((role, layer), nothing) for layer in layer_of]
        if role == "backward":
            layers.reverse()
        return layers

    def work(self) -> tuple[float, ...]:
        """The work of one step, recomputation included, in the order of `WORK`."""
        total = np.zeros(len(WORK))
        for (tape, _), times in zip(self.runs, self._times, strict=True):
            if self.layers_only:
                times = np.append(times[:-1], 0.0)
            total += tape.work(times)
        return tuple(total.tolist())


def _outside_the_layers(of_runs: Sequence[Levels]) -> dict[str, Floats]:
    """The levels of the segments outside the layers, by role: those of the first run, where segments of the other runs
    free storages of their layers."""
    first, *others = of_runs
    outside = {}
    for (role, layer), level in first.items():
        if layer < 0:
            for other in others:
                if (role, layer) in other:
                    level = level + other[role, layer] * (1, 0, 1)  # the change and the gradients, not the highest
            outside[role] = level
    return outside


# ---- weights and optimizers -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor that exists during the whole step."""

    part: str  # ``weights`` (buffers, too), ``quantisation constants``, ``adapters`` or ``checksums``
    layer: int  # position among the recorded layers; -1: none
    nbytes: int  # as it is stored
    elements: int = 0  # of a parameter, before it is quantised
    itemsize: int = 0  # bytes of an element of its gradient
    trained: bool = False  # whether it has a gradient and optimizer state
    streams: bool = False  # whether it is in host memory where its layer is streamed
    fused: bool = False  # whether the files have it in parts, which are joined on the card
    count: int = 1  # of such tensors

    @property
    def gradient(self) -> int:
        """Bytes of the gradients, and of the tensors where they are trained."""
        return self.elements * self.itemsize * self.count

    @property
    def loading(self) -> int:
        """Most bytes beside its own while it is loaded: in 16 bits before it is packed, and its parts."""
        is_quantised = self.elements * self.itemsize > self.nbytes
        if is_quantised and self.fused:
            return 4 * self.elements - self.nbytes
        if is_quantised:
            return 2 * self.elements
        if self.fused:
            return self.nbytes
        return 0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Memory of an optimizer: its state, and temporary memory of its step.

    Sources: torch 2.13 ``optim/adam.py`` (states in the parameter's dtype; a foreach step takes one copy of the
    parameters, the loop on a CPU three of one, the fused form none); bitsandbytes 0.50.2 ``optim/optimizer.py`` (8-bit
    states with a float32 constant per 256 elements; float32 below 4096 elements) and ``backends/cpu/ops.py`` (float32
    copies of one parameter, its gradient, its states and two results). Paged states are counted as host memory.
    """

    states: int  # values per parameter
    bits: int = 0  # of a value; 0: the parameter's dtype
    paged: bool = False  # in managed memory
    copies: int = 0  # of all trained parameters during a step
    on_cpu: bool = False  # parameters are stepped one by one

    def kept(self, trained: Iterable[Weight]) -> int:
        """Bytes of state, on the card or the host."""
        return self.states * sum(self._of_a_state(tensor) * tensor.count for tensor in trained)

    def _of_a_state(self, tensor: Weight) -> int:
        if not self.bits:
            return tensor.elements * tensor.itemsize
        if self.bits == 8 and tensor.elements >= 4096:
            constants = -(-tensor.elements // 256)
            return tensor.elements + 4 * constants
        return 4 * tensor.elements

    def taken(self, trained: Sequence[Weight]) -> float:
        """Bytes of temporary memory in a step."""
        if not self.on_cpu:
            return float(self.copies * sum(tensor.gradient for tensor in trained))
        floats = 0  # copies in float32
        if self.bits == 8:
            floats = self.states + 4
        most = 0
        for tensor in trained:
            most = max(most, tensor.elements * (3 * self.copies * tensor.itemsize + 4 * floats))
        return float(most)


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch_fused": Optimizer(states=2),
    "adamw_torch": Optimizer(states=2, copies=1),
    "adamw_8bit": Optimizer(states=2, bits=8),
    "adamw_bnb_8bit": Optimizer(states=2, bits=8),
    "paged_adamw_8bit": Optimizer(states=2, bits=8, paged=True),
    "paged_adamw_32bit": Optimizer(states=2, bits=32, paged=True),
    "lion_8bit": Optimizer(states=1, bits=8),
    "lion_32bit": Optimizer(states=1, bits=32),
    "sgd": Optimizer(states=0),
}


# ---- estimates --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Weights:
    parts: Mapping[str, int]  # bytes by part
    trained: tuple[Weight, ...]  # the tensors that have gradients
    parameters: int  # of the model without adapters, before quantisation
    loading: int  # most bytes beside those of its parts while one tensor is loaded
    streams: tuple[int, ...] = ()  # of each layer of the real model, the bytes that can be streamed
    largest_layer: int = 0  # parameters of the largest layer

    @property
    def gradients(self) -> float:
        """Bytes of all gradients, and of the trained tensors."""
        return float(sum(tensor.gradient for tensor in self.trained))

    @classmethod
    def total(cls, tensors: Iterable[Weight], layer_of: Sequence[int]) -> Weights:
        """The sums over the tensors of the recorded layers, each as often as the real model has such a layer."""
        parts = {"weights": 0, "quantisation constants": 0, "adapters": 0, "checksums": 0}
        trained = []
        parameters = loading = 0
        streamed_bytes = dict.fromkeys(layer_of, 0)  # by recorded layer
        sizes = dict.fromkeys(layer_of, 0)  # parameters, by recorded layer
        for tensor in tensors:
            count = 1
            if tensor.layer >= 0:
                count = layer_of.count(tensor.layer)
            parts[tensor.part] += tensor.nbytes * count
            if tensor.layer in sizes:
                sizes[tensor.layer] += tensor.elements
                if tensor.streams:
                    streamed_bytes[tensor.layer] += tensor.nbytes
            if tensor.trained and count:
                trained.append(replace(tensor, count=count))
            if tensor.part == "weights":
                parameters += tensor.elements * count
                loading = max(loading, tensor.loading)
        return cls(
            parts=parts,
            trained=tuple(trained),
            parameters=parameters,
            loading=loading,
            streams=tuple(streamed_bytes[layer] for layer in layer_of),
            largest_layer=max(sizes.values(), default=0),
        )

    def streamed(self, count: int) -> list[int]:
        """The bytes in host memory of each layer where so many are streamed."""
        return [self.streams[layer] for layer in spread(count, len(self.streams))]

    def on_card(self, count: int) -> dict[str, int]:
        """The parts that stay on the card where so many layers are streamed, with the buffers that these share."""
        if not count:
            return dict(self.parts)
        sizes = self.streamed(count)
        buffers = 0
        for first in range(min(count, LAYER_BUFFERS_A_CARD)):  # layers take the buffers by turns
            buffers += max(sizes[first::LAYER_BUFFERS_A_CARD])
        resident = self.parts["weights"] - sum(sizes)
        return {**self.parts, "weights": resident, "buffers of streamed layers": buffers}

    def visiting(self, count: int) -> float:
        """Bytes that come to the card in a forward and backward pass: the last layers of one begin the other."""
        return 2 * sum(self.streamed(count)) * max(count - LAYER_BUFFERS_A_CARD, 0) / max(count, 1)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speed of a card: a matrix product of n operations takes ``n / products + per_product`` seconds.

    The defaults are for an RX 7900 XT, on which no training step has been published. 77 TFLOPS in bfloat16 at best
    (zzc0721/torch-performance-test-data, through ZLUDA); the time of each product brings the estimates for the two
    published steps of an XTX to 0.84 of what was measured there, the ratio of both cards' data sheets (51.6 and 61.4
    TFLOPS in float32). 4-bit weights: torchtune's Llama-3.1-8B on a 4090, 3,083 tokens a second with LoRA and 2,413
    with QLoRA, scaled by bandwidth. The upper bound is an XTX's speed (1 / 0.84); the lower one is chosen by us: the
    XT's 14 TFLOPS at 1024 cubed, through ZLUDA, make 125e-6 seconds of each product, 0.85 of the estimate, and other
    kernels and 4-bit weights may be slower as well. Without a ``known`` figure they only rank choices.
    """

    known: bool = True
    products: float = 77e12  # floating point operations a second of a large product in bfloat16
    per_product: float = 93e-6  # additional seconds
    unpacked: float = 45e9  # elements of 4-bit weights dequantised to bfloat16 a second
    least: float = 0.6  # bounds of the true speed as shares of the estimate
    most: float = 1.2


#: Cards with rates of their own. XTX: the time of a product that brings the estimates for the two published steps of
#: Qwen2.5-3B on one (`benchmarks/plan_published.py`) to what was measured; its bounds, for other models, are chosen.
RATES_OF = {"7900 xtx": Rates(per_product=75e-6, least=0.7, most=1.3)}


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """The memory of one card, in bytes."""

    name: str  # for output
    usable: int  # visible to torch
    desktop: int = DESKTOP_BYTES  # used by other programs
    desktop_source: str = "assumed"
    context: int = CONTEXT_BYTES  # used by the runtime, assumed
    bandwidth: float = 800e9  # bytes a second, by the data sheet
    link: float = LINK  # bytes a second from host memory
    link_source: str = "assumed"
    host: int | None = None  # memory of the host; None: unknown
    rates: Rates = Rates()

    @property
    def free(self) -> int:
        return self.usable - self.desktop - self.context

    @property
    def margin(self) -> float:
        """Bytes that a choice should leave free: `TIGHT`, or a share of a limit that is smaller than any card."""
        if self.usable < 4 * GIB:
            return self.usable / 64
        return TIGHT

    @property
    def room(self) -> float:
        """Bytes that a choice leaves free if any does: `ROOM`, or a share of a card or a limit below 16 GiB."""
        return max(self.margin, min(ROOM, self.usable / 8))

    @property
    def rooms(self) -> tuple[float, float]:
        """What a choice should leave, the best first."""
        return self.room, self.margin


@dataclass(frozen=True, kw_only=True)
class Case:
    micro_batch: int  # sequences on one card at a time
    length: int  # tokens of a sequence
    checkpointing: bool  # activations are recomputed
    packing: bool = False  # a row has several sequences, and all rows become one (TRL's ``bfd``)
    accumulation: int = 1  # micro-batches per optimizer step
    cards: int = 1  # that each have the whole model and average gradients
    # from the first layer on, the number of layers that recompute everything, and then of those that keep products and
    # attention; None: all or no layers, as ``checkpointing`` says
    recompute: tuple[int, int] | None = None
    streamed: int = 0  # layers whose weights live in host memory
    flights: int = 1  # micro-batches in flight, each of which keeps its activations
    trainer: str = "sft"  # ``dpo`` and ``kto`` have a second pass, of the reference model
    eval_batch: int | None = None  # sequences at a time in evaluation; None: without one
    evaluation: bool = False  # an evaluation's forward pass instead of a training step

    @property
    def content(self) -> str:
        """``packed``; ``plain`` for a single sequence, which needs no padding; else ``padded``."""
        if self.packing:
            return "packed"
        if self.shape[0] == 1:
            return "plain"
        return "padded"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the tensors of a micro-batch."""
        rows = self.micro_batch
        if self.trainer == "dpo":  # chosen and rejected
            rows *= 2
        if self.packing:
            return (1, rows * self.length)
        return (rows, self.length)

    @property
    def evaluated(self) -> Case:
        size = self.eval_batch or 1
        return replace(self, micro_batch=size, checkpointing=False, recompute=None, evaluation=True)


def describe(case: Mapping[str, Any]) -> str:
    """A `Case`, by the names of its fields."""
    if case["recompute"] is not None:
        activations = "{} layers recomputed whole and {} selectively".format(*case["recompute"])
    elif case["checkpointing"]:
        activations = "activations recomputed"
    else:
        activations = "activations kept"
    description = f"micro-batch {case['micro_batch']} x {case['accumulation']} accumulated, {activations}"
    if case["streamed"]:
        description += f", {case['streamed']} layers streamed"
    return description


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str  # ``lora``, ``qlora`` or ``full``
    weights: Weights
    trace: Callable[[Case], Step]  # the recorded step of a case
    optimizer: Optimizer


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated memory and speed of a case."""

    variant: str  # name of the method
    case: Case
    parts: Mapping[str, float]  # bytes at the peak, by part, in the order of output
    moment: str  # of the peak, by the names of `moments`
    moments: Mapping[str, float]  # highest level at each kind of moment, in bytes of torch's allocator
    total: float  # bytes of the card, everything included
    spare: float  # bytes left over; negative: missing
    tight: bool  # it fits with less left over than the assumed parts may be wrong
    roomy: bool  # it leaves what is preferred until a card has run it
    tokens_per_second: float  # on all cards, padding counted as tokens
    shares: Mapping[str, float]  # of the time, by cause
    visiting: float = 0.0  # bytes of streamed weights that come to a card in an optimizer step
    host_missing: float = 0.0  # bytes that the host lacks for streamed weights

    @property
    def fits(self) -> bool:
        return self.spare >= 0 >= self.host_missing

    @property
    def allocated(self) -> float:
        """The allocator's peak, without slack, context and desktop, to compare with measurements."""
        return max(self.moments.values())


def missing(option: Estimate) -> str:
    """What an option that does not fit lacks, of the card, of the host, or of both."""
    of_card = f"{-option.spare / GIB:.1f} GiB are missing on the card"
    of_host = f"{option.host_missing / GIB:.1f} GiB of host memory for streamed weights"
    if not option.host_missing:
        return of_card
    if option.spare < 0:
        return f"{of_card} and {of_host}"
    return f"{of_host} are missing"


def estimate(variant: Variant, case: Case, card: CardMemory) -> Estimate:
    """Memory and speed of a case: what the card holds during the whole step, and the highest moment above that."""
    weights = variant.weights
    step = variant.trace(case)
    peak = step.peak(accumulating=case.accumulation > 1)
    on_card = weights.on_card(case.streamed)
    parts = {name: float(nbytes) for name, nbytes in on_card.items()}
    parts["optimizer state"] = 0.0
    if not variant.optimizer.paged:
        parts["optimizer state"] = float(variant.optimizer.kept(weights.trained))
    copied = 0
    if case.trainer != "sft" and variant.name == "full":  # the reference of DPO and KTO is a second model
        copied = weights.parts["weights"] + weights.parts["quantisation constants"]
        parts["reference model"] = float(copied)
    if case.cards > 1:
        parts["gradient buckets"] = weights.gradients
    held = sum(parts.values())
    others_in_flight = (case.flights - 1) * peak.most_kept  # an upper bound: each at its highest

    moments: dict[str, float] = {}
    for role, level in peak.by_role.items():
        moment = f"{role} pass" if role in _OF_LAYERS else role
        moments[moment] = held + others_in_flight + level
    moments["optimizer step"] = held + peak.all_gradients + variant.optimizer.taken(weights.trained)
    moments["loading"] = copied + on_card["weights"] + on_card["quantisation constants"] + weights.loading
    if case.eval_batch:
        moments["evaluation"] = held + variant.trace(case.evaluated).peak().total
    highest = max(moments, key=lambda moment: moments[moment])

    if highest == "optimizer step":
        gradients, kept = peak.all_gradients, 0.0
    elif highest in ("loading", "evaluation"):
        gradients, kept = 0.0, 0.0
    else:
        gradients, kept = peak.gradients, peak.kept + others_in_flight
    working = moments[highest] - held - kept - gradients
    parts["gradients"] = gradients
    parts["activations kept"] = kept
    parts["working memory"] = working
    parts["allocator slack"] = SLACK_SHARE * (gradients + kept + working) + SLACK_FLOOR
    parts["context"] = float(card.context)
    parts["desktop"] = float(card.desktop)
    total = sum(parts.values())
    spare = card.usable - total
    host_missing = 0.0
    if case.streamed and card.host:
        host_missing = max(0.0, sum(host(variant, case).values()) - card.host)

    seconds = _seconds(case, step, float(weights.parts["weights"]), card)
    visiting = weights.visiting(case.streamed)
    seconds["waiting for streamed weights"] = max(0.0, visiting / card.link - sum(seconds.values()))
    all_seconds = sum(seconds.values())
    return Estimate(
        variant=variant.name,
        case=case,
        parts=parts,
        moment=highest,
        moments=moments,
        total=total,
        spare=spare,
        tight=0 <= spare < card.margin,
        roomy=spare >= card.room,
        tokens_per_second=case.cards * case.micro_batch * case.length / all_seconds,
        shares={cause: of_cause / all_seconds for cause, of_cause in seconds.items()},
        visiting=visiting * case.accumulation,
        host_missing=host_missing,
    )


def _seconds(case: Case, step: Step, weights: float, card: CardMemory) -> dict[str, float]:
    """Seconds of matrix products, dequantisation and memory traffic, by their rates; or of launches if longer.

    Frozen weights are read once in each direction, and once more if a layer is recomputed completely.
    """
    flops, written, launches, products, unpacked = step.work()
    rates = card.rates
    read_again = float(case.checkpointing)
    if case.recompute:
        read_again = case.recompute[0] / step.layers
    moved = MOVED_PER_WRITTEN * written + (2 + read_again) * weights
    seconds = {
        "matrix products": flops / rates.products + products * rates.per_product,
        "4-bit weights": unpacked / rates.unpacked,
        "memory traffic": moved / (BANDWIDTH_SHARE * card.bandwidth),
    }
    seconds["waiting for launches"] = max(0.0, launches * LAUNCH - sum(seconds.values()))
    return seconds


def fastest(options: Iterable[Estimate]) -> Estimate | None:
    """The fastest of the options that leave the card's room; of nearly equal ones the smallest micro-batch, then that
    which leaves most memory.

    If none leaves the room, the same of those that leave the margin; if none leaves that, the option that leaves most.
    A mix of recomputation must be faster by `MIX_GAIN`.
    """
    fitting = [option for option in options if option.fits]
    offered = roomiest(fitting, lambda option: option)
    without_mix = max((option.tokens_per_second for option in offered if not option.case.recompute), default=0.0)
    worth = [
        option
        for option in offered
        if not option.case.recompute or option.tokens_per_second * (1 - MIX_GAIN) > without_mix
    ]
    fastest_rate = max((option.tokens_per_second for option in worth), default=0.0)
    nearly = [option for option in worth if option.tokens_per_second >= fastest_rate * (1 - NEAR)]
    if any(option.tight for option in nearly):
        return max(fitting, key=lambda option: option.spare)
    return min(nearly, key=lambda option: (option.case.micro_batch, -option.spare), default=None)


def roomiest(fitting: Sequence[T], option_of: Callable[[T], Estimate]) -> Sequence[T]:
    """Those that leave the card's room; if there are none, those that leave its margin; else all."""
    with_room = [candidate for candidate in fitting if option_of(candidate).roomy]
    with_margin = [candidate for candidate in fitting if not option_of(candidate).tight]
    return with_room or with_margin or fitting


def little_room(spare: float, card: CardMemory) -> str | None:
    """The line on a choice that fits and leaves less than is preferred; None: it leaves that."""
    if not 0 <= spare < card.room:
        return None
    return (
        f"leaves {spare / GIB:.1f} GiB free; {card.room / GIB:.1f} are preferred until an AMD card has run what is "
        "planned, and no choice that fits leaves as much"
    )


# Assumed, of the host's memory:
SYSTEM_BYTES = 5 * GIB // 2  # system and desktop session
PROCESS_BYTES = 3 * GIB  # Python, torch, ROCm runtime and kernels of one process
WORKER_BYTES = GIB // 2  # one data loader worker
#: The page-locked ring of the verified transfer: 4 slots of 32 MiB (``transfer/staging.py``).
RING_BYTES = 4 * 32 * (1 << 20)


def host(variant: Variant, case: Case, *, workers: int = 0) -> dict[str, float]:
    """Host memory of all training processes: bytes by part. Weight files are page cache, which the system frees; those
    of streamed layers must stay, and quantised ones are memory of each process."""
    state = variant.optimizer.kept(variant.weights.trained)
    parts = {
        "system": float(SYSTEM_BYTES),
        "processes": float(case.cards * PROCESS_BYTES),
        "page-locked ring": float(case.cards * RING_BYTES),
        "a checkpoint being written": variant.weights.gradients + state,
        # In float32, with the bytes that it was made of (``train/arithmetic/layers.py``)
        "a layer computed again at the start": float(case.cards * 6 * variant.weights.largest_layer),
    }
    if variant.optimizer.paged:
        parts["paged optimizer state"] = float(case.cards * state)
    if case.streamed:
        copies = 1
        if variant.name == "qlora":
            copies = case.cards
        parts["streamed layers"] = float(copies * sum(variant.weights.streamed(case.streamed)))
    if workers:
        parts["data loader workers"] = float(case.cards * workers * WORKER_BYTES)
    return parts
