"""Fault injection into transfers: ``HF_ROCM_TUNE_FAULT="kind=zero,rate=0.02,seed=7,persist=0"``.

Everything above the backend runs unchanged, so an injected fault that is missed would be missed in a real run. A fault
that would not change the bytes (zeroing zeros, equal stale data) is neither injected nor counted.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from hf_rocm_tune.machine.variables import read_spec
from hf_rocm_tune.transfer.backend import Backend, Label, Part, Queued
from hf_rocm_tune.transfer.report import BETWEEN_CARDS, STAGES

VARIABLE = "HF_ROCM_TUNE_FAULT"
KINDS = ("zero", "zero_range", "flip", "bits", "stride", "stale", "swap", "drop", "late", "after")
FAULT_STAGES = (*STAGES, BETWEEN_CARDS, "gradients", "gathered")
"""Where faults can be injected: all transfers, and gradient averages and gathered weights of other libraries."""


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    # ``zero`` the tensor, ``zero_range`` a part of it, ``flip`` one bit, ``bits`` 2 to 6 bits of two neighbouring
    # words, ``stride`` one bit every 64, 256 or 4,096 bytes, ``stale`` bytes of an earlier transfer, ``swap`` two
    # words, ``drop`` the copy, ``late``: it arrives only after the digest was taken, ``after``: one bit is flipped just
    # after the tensor was verified
    kind: str
    rate: float = 1.0  # share of matching tensors that get the fault, 0 to 1
    seed: int = 0  # the same seed selects the same transfers, whatever the order of the threads
    persist: bool = False  # whether each retry of a transfer gets the fault as well
    # only this stage. In ``gradients`` (averages of buckets), ``buckets`` (copies to the host) and ``gathered``
    # (weights gathered by FSDP2) only ``zero zero_range flip bits stride stale swap`` have an effect.
    stage: str | None = None
    tensor: str = "*"  # only names that match this pattern (``fnmatch``)
    first: int = 1  # the first matching transfer (from 1) that may get a fault
    count: int | None = None  # stop after this many injections

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        allowed = {"kind": KINDS, "stage": FAULT_STAGES}
        return read_spec(cls, VARIABLE, text, allowed=allowed, least={"first": 1, "count": 1})

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> FaultSpec | None:
        """The specification in `HF_ROCM_TUNE_FAULT`; None when it is unset or empty."""
        text = environ.get(VARIABLE, "").strip()
        return cls.parse(text) if text else None


_REMEMBERED_BYTES = 4 << 20


@dataclass
class _Plan:
    """The fault of one tensor of one transfer, in coordinates of that tensor."""

    rng: random.Random
    anchor: int
    length: int
    hit_attempts: set[int] = field(default_factory=set)


Later = tuple[Tensor, Tensor, Label]
"""Device memory, and bytes to write into it later."""


class FaultyBackend:
    """Injects the faults of `spec` into the copies of `inner`.

    Attributes:
        injected: number of corrupted tensors so far; each attempt whose bytes were changed counts.
    """

    def __init__(self, inner: Backend, spec: FaultSpec) -> None:
        self.inner = inner
        self.spec = spec
        self.device = inner.device
        self.default_slot_bytes = inner.default_slot_bytes
        self.staging_grows = inner.staging_grows
        self.staging = inner.staging
        self.allocate = inner.allocate
        self.mark = inner.mark
        self.follow = inner.follow
        self.read_back = inner.read_back
        self.hand_out = inner.hand_out
        self.injected = 0
        self._matched = 0
        self._lock = threading.RLock()
        self._seen: Counter[tuple[str, str]] = Counter()
        self._plans: dict[tuple[int, str], _Plan | None] = {}
        self._earlier: deque[Tensor] = deque(maxlen=8)
        self._later: list[Later] = []

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Queued:
        with self._lock:
            if self.spec.kind == "late":  # not those of the same attempt, which is not digested yet
                self._write(lambda later: later[2][1:3] != label[1:3])
            corrupted = self._corrupt(target, source, label)
        if corrupted is None:
            return self.inner.copy(target, source, label, blocking=blocking)
        # Blocking, so that the corrupted bytes need not be kept until the copy's end.
        return self.inner.copy(target, corrupted, label, blocking=True)

    def corrupt_in_place(self, data: Tensor, label: Label) -> None:
        """Corrupt bytes, uint8[n], that no copy of this backend has written; kinds that need a copy do nothing."""
        if self.spec.kind in ("drop", "late", "after"):
            return
        right = data.cpu()
        with self._lock:
            corrupted = self._corrupt(right, right, label)
        if corrupted is not None:
            data.copy_(corrupted)

    def fill(self, target: Tensor, value: int) -> None:
        if self.spec.kind == "late":
            self._write(lambda _: True)
        self.inner.fill(target, value)

    def digest(self, target: Tensor, word_offset: int = 0) -> Queued:
        return self._harmed_after(target, self.inner.digest(target, word_offset))

    def digest_beside(self, target: Tensor) -> Queued:
        return self._harmed_after(target, self.inner.digest_beside(target))

    def _harmed_after(self, target: Tensor, pending: Queued) -> Queued:
        if self.spec.kind == "after":
            pending.result()
            storage = target.untyped_storage().data_ptr()
            self._write(lambda later: later[0].untyped_storage().data_ptr() == storage)
        return pending

    def close(self) -> None:
        self._later = []
        self.inner.close()

    def _write(self, due: Callable[[Later], bool]) -> None:
        with self._lock:
            now = list(filter(due, self._later))
            self._later = list(itertools.filterfalse(due, self._later))
        for target, value, label in now:
            self.inner.copy(target, value, label, blocking=True)

    def _corrupt(self, target: Tensor, source: Tensor, label: Label) -> Tensor | None:
        """The bytes to send instead of `source`, or None if this copy gets no fault."""
        corrupted: Tensor | None = None
        for part in label.parts:
            right = source[part.begin : part.end]
            plan = self._plan(part, label)
            if plan is not None and part.end > part.begin:
                wrong = self._wrong_bytes(plan, part, right, target[part.begin : part.end], label)
                if wrong is not None and not torch.equal(wrong, right):
                    self._count(plan, label.attempt)
                    corrupted = source.clone() if corrupted is None else corrupted
                    corrupted[part.begin : part.end] = wrong
            if self.spec.kind == "stale" and label.attempt == 0:
                self._earlier.append(right[:_REMEMBERED_BYTES].clone())
        return corrupted

    def _plan(self, part: Part, label: Label) -> _Plan | None:
        """Decided once per tensor and transfer: by seed, stage, name and occurrence, not by the order of threads."""
        spec = self.spec
        key = (label.transfer, part.name)
        if key not in self._plans:
            self._plans[key] = None
            if part.nbytes and fnmatchcase(part.name, spec.tensor) and spec.stage in (None, label.stage):
                self._matched += 1
                self._seen[label.stage, part.name] += 1
                rng = random.Random(f"{spec.seed}:{label.stage}:{part.name}:{self._seen[label.stage, part.name]}")
                if rng.random() < spec.rate and self._matched >= spec.first:
                    anchor = rng.randrange(part.nbytes)
                    self._plans[key] = _Plan(rng, anchor, rng.randint(1, part.nbytes - anchor))
        plan = self._plans[key]
        if plan is None or (label.attempt and not spec.persist):
            return None
        exhausted = spec.count is not None and self.injected >= spec.count
        if exhausted and not plan.hit_attempts:
            return None
        return plan

    def _count(self, plan: _Plan, attempt: int) -> None:
        if attempt not in plan.hit_attempts:
            plan.hit_attempts.add(attempt)
            self.injected += 1

    def _wrong_bytes(self, plan: _Plan, part: Part, right: Tensor, target: Tensor, label: Label) -> Tensor | None:
        kind = self.spec.kind
        wrong = right.clone()
        anchor = plan.anchor - part.offset
        if kind == "zero":
            return wrong.zero_()
        if kind == "zero_range":
            wrong[max(anchor, 0) : max(anchor + plan.length, 0)] = 0
            return wrong
        if kind == "stale":
            for earlier in reversed(self._earlier):
                wrong[: earlier.numel()] = earlier[: wrong.numel()]
                if not torch.equal(wrong, right):
                    break
            return wrong
        if kind in ("drop", "late"):
            there = self.inner.read_back(target)
            if kind == "late" and not torch.equal(there, right):
                self._later.append((target, wrong, label))
            return there
        if kind == "stride":  # the anchor may lie before these bytes
            stride = (64, 256, 4096)[plan.anchor % 3]
            wrong[anchor if anchor >= 0 else anchor % stride :: stride] ^= 1 << plan.length % 8
            return wrong
        if not 0 <= anchor < right.numel():
            return None
        if kind == "swap":  # with the first different word
            words = wrong[: right.numel() // 4 * 4].view(-1, 4)
            here = min(anchor // 4, len(words) - 1)
            there = (words != words[here]).any(1).nonzero().flatten()[:1] if len(words) else words
            if there.numel():
                words[[here, int(there)]] = words[[int(there), here]]
            return wrong
        if kind == "bits":
            word = anchor // 4 * 4
            for bit in plan.rng.sample(range(8 * min(8, right.numel() - word)), plan.rng.randint(2, 6)):
                wrong[word + bit // 8] ^= 1 << bit % 8
            return wrong
        wrong[anchor] ^= 1 << plan.rng.randrange(8)
        if kind == "after":
            self._later.append((target, wrong, label))
            self._count(plan, label.attempt)  # now: the next transfer may be planned before this one's verdict
            return None
        return wrong
