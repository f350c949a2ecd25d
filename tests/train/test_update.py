"""Attacks on what lies between gradients and new weights: torch's and bitsandbytes' own code with a fault in it.

Clean steps by the thousand raise no alarm; a wrong step, scale, moment, clipping, norm or learning rate is found.
"""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.train.arithmetic import StepVerdict
from hf_rocm_tune.train.update import Schedule, UpdateChecks
from hf_rocm_tune.transfer import TransferReport
from tests import simcard

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))]
SHAPES = [(48, 16), (7,), (1,), (5, 3, 2), (400,)]


def parameters(dtype: torch.dtype, scale: float = 0.1, shapes: Any = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter((torch.randn(shape) * scale).to(dtype)) for shape in shapes]


def watched(optimizer: torch.optim.Optimizer, schedule: Schedule | None = None) -> UpdateChecks:
    checks = UpdateChecks(TransferReport(), on=True)
    checks.watch(optimizer, {}, schedule)
    return checks


def gradients(optimizer: Any, step: int, generator: torch.Generator, size: float) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            grad = torch.randn(each.shape, generator=generator) * size
            each.grad = (grad * 10 ** (step % 5 - 2)).to(each.dtype)
            if step % 7 == 3:
                each.grad.zero_()


def train(optimizer: Any, checks: UpdateChecks, steps: int, *, size: float = 1.0, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        gradients(optimizer, step, generator, size)
        optimizer.step()
        checks.check_now()


def counted(checks: UpdateChecks, what: str) -> int:
    return int(checks._report.to_dict()["arithmetic"][what])


# ---- no false alarm -------------------------------------------------------------------------------------------------

ADAM: list[dict[str, Any]] = [
    {"fused": True},
    {"foreach": True},
    {"foreach": False, "weight_decay": 0.3, "lr": 2e-2},
    {"fused": True, "maximize": True, "betas": (0.5, 0.9), "eps": 1e-3},
    {"foreach": True, "betas": (0.0, 0.999), "weight_decay": 0.0},
]
SGD: list[dict[str, Any]] = [
    {"fused": True, "momentum": 0.9},
    {"foreach": True, "weight_decay": 0.1},
    {"foreach": False, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"foreach": True, "momentum": 0.5, "dampening": 0.3, "maximize": True},
]
TORCH = [
    *((kind, options) for kind in (torch.optim.AdamW, torch.optim.Adam) for options in ADAM),
    *((torch.optim.SGD, options) for options in SGD),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("kind", "options"), TORCH)
def test_clean_updates_raise_no_alarm(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype, options: dict[str, Any], seed: int
) -> None:
    if options.get("fused") and "momentum" in options and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("torch 2.13's fused SGD on a CPU gives wrong momenta in 16 bits, which the check has found")
    if dtype == torch.float16 and kind is not torch.optim.SGD and not options.get("fused"):
        pytest.skip("an eps of 1e-8 is zero in float16, so that torch itself divides by zero")
    torch.manual_seed(seed)
    for size in (0.1, 1e-3, 1e-5) if dtype == torch.float16 else (1.0, 1e-8, 1e6):  # within its range
        optimizer = kind(parameters(dtype), **{"lr": 1e-3, **options})  # type: ignore[call-arg]
        checks = watched(optimizer)
        assert checks.refusal is None
        train(optimizer, checks, 40, size=size, seed=seed)
        assert counted(checks, "updates") == 40 * 4


BNB: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (bitsandbytes.optim.AdamW8bit, {"weight_decay": 0.1}),
    (bitsandbytes.optim.AdamW, {"optim_bits": 8, "betas": (0.8, 0.95), "eps": 1e-4}),
    (bitsandbytes.optim.Adam8bit, {"weight_decay": 0.01}),
    (bitsandbytes.optim.AdamW32bit, {"weight_decay": 0.1}),
]
LARGE = [(64, 80), (4096,), (5000,), (70, 90), (9,)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), BNB)
def test_clean_updates_in_8_bit_raise_no_alarm(
    kind: Callable[..., Any], options: dict[str, Any], dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    for size in (1.0, 1e-6, 1e3):
        optimizer = kind(parameters(dtype, shapes=LARGE), lr=1e-3, **options)
        checks = watched(optimizer)
        assert checks.refusal is None
        train(optimizer, checks, 30, size=size, seed=seed)
        assert counted(checks, "updates") == 30 * 4


# ---- a wrong update -------------------------------------------------------------------------------------------------

Tensors = list[torch.Tensor]


def sign(new: Tensors, old: Tensors, *_: Tensors) -> None:
    for each, before in zip(new, old, strict=True):
        each.copy_(2 * before - each)


def first_moment(_new: Tensors, _old: Tensors, first: Tensors, *_: Tensors) -> None:
    for each in first:
        each.neg_()


def second_moment(_new: Tensors, _old: Tensors, _first: Tensors, second: Tensors) -> None:
    for each in second:
        each.mul_(1.5)


def nothing(new: Tensors, old: Tensors, *_: Tensors) -> None:
    for each, before in zip(new, old, strict=True):
        each.copy_(before)


def too_far(new: Tensors, old: Tensors, *_: Tensors) -> None:
    for each, before in zip(new, old, strict=True):
        each.copy_(before + 3 * (each - before))


def not_a_number(new: Tensors, *_: Tensors) -> None:
    for each in new:
        each.fill_(float("nan"))


def break_torch(monkeypatch: pytest.MonkeyPatch, where: str, when: Callable[[int], bool], fault: Any) -> None:
    """The fault is within torch's own step, in the calls that are asked for."""
    module: Any = importlib.import_module(f"torch.optim.{where}")
    stock, calls = getattr(module, where), itertools.count()

    def wrong(new: Tensors, grads: Tensors, *rest: Any, **more: Any) -> None:
        old = [each.clone() for each in new]
        stock(new, grads, *rest, **more)
        if when(next(calls)):
            fault(new, old, *rest[:2])

    monkeypatch.setattr(module, where, wrong)


@pytest.mark.parametrize("fault", [sign, second_moment, first_moment, nothing, too_far, not_a_number])
@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("fused", [True, False])
def test_a_wrong_update_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], at: int, fused: bool
) -> None:
    break_torch(monkeypatch, "adam", lambda call: call == at, fault)
    torch.manual_seed(at)
    optimizer = torch.optim.AdamW(parameters(torch.float32), lr=1e-2, fused=fused)
    checks = watched(optimizer)
    with pytest.raises(CorruptionError, match=r"update of .* is wrong: .* instead of"):
        train(optimizer, checks, at + 1)
    assert counted(checks, "disagreements") == 1


@pytest.mark.parametrize("fault", [sign, first_moment, nothing, too_far])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_wrong_update_by_sgd_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], momentum: float
) -> None:
    if fault is first_moment and not momentum:
        pytest.skip("it has none")
    break_torch(monkeypatch, "sgd", lambda call: call == 2, fault)
    optimizer = torch.optim.SGD(parameters(torch.float32), lr=1e-2, momentum=momentum)
    with pytest.raises(CorruptionError, match=r"update of .* is wrong"):
        train(optimizer, watched(optimizer), 3)


EIGHT: dict[str, Callable[..., None]] = {
    "sign": lambda before, p, state: p.copy_(2 * before - p),
    "codes of the first moment": lambda before, p, state: state["state1"].copy_(255 - state["state1"]),
    "codes of the second moment": lambda before, p, state: state["state2"].clamp_(max=40),
    "scale of the first moment": lambda before, p, state: state["absmax1"].mul_(1.3),
    "scale of the second moment": lambda before, p, state: state["absmax2"].mul_(0.7),
    "lost": lambda before, p, state: p.copy_(before),
}


@pytest.mark.parametrize("kind", EIGHT)
def test_a_wrong_update_in_8_bit_is_found(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    class Wrong(bitsandbytes.optim.AdamW8bit):
        pass

    stock = bitsandbytes.optim.AdamW8bit.update_step

    def wrong(self: Any, group: Any, p: Any, gindex: int, pindex: int) -> None:
        before = p.detach().clone()
        stock(self, group, p, gindex, pindex)
        if self.state[p]["step"] == 3 and "absmax1" in self.state[p]:
            with torch.no_grad():
                EIGHT[kind](before, p, self.state[p])

    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "update_step", wrong)
    torch.manual_seed(3)
    optimizer = bitsandbytes.optim.AdamW8bit(parameters(torch.float32, shapes=LARGE[:4]), lr=1e-3)
    with pytest.raises(CorruptionError, match=r"update of .* is wrong"):
        train(optimizer, watched(optimizer), 3)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda rows: torch.optim.RMSprop(rows, lr=0.1), "the optimizer is RMSprop"),
        (torch.optim.Adagrad, "Adagrad"),
        (lambda rows: bitsandbytes.optim.Lion8bit(rows), "Lion8bit"),
    ],
)
def test_another_optimizer_is_named_as_unchecked(made: Callable[..., Any], says: str) -> None:
    checks = watched(made(parameters(torch.float32)))
    assert checks.refusal is not None and says in checks.refusal and checks.pending() == []


# ---- fp16's scaler --------------------------------------------------------------------------------------------------


class Scaler(torch.amp.GradScaler):
    def __init__(self) -> None:
        super().__init__("cpu", init_scale=2.0**12)


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_a_scaled_step_is_checked(monkeypatch: pytest.MonkeyPatch, fused: bool, infinite: bool) -> None:
    """A fused step skips what is infinite itself; where it does not, the check says so."""
    torch.manual_seed(1)
    rows = parameters(torch.float32)
    optimizer = torch.optim.AdamW(rows, lr=1e-2, fused=fused)
    checks, scaler = watched(optimizer), Scaler()
    for step in range(4):
        scaler.scale(sum((each**2).sum() for each in rows)).backward()
        if infinite and step == 2:
            for each in rows:
                each.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        checks.check_now()
        optimizer.zero_grad()
    assert counted(checks, "updates") == (16 if fused or not infinite else 12)
    if not fused:
        return
    break_torch(monkeypatch, "adam", lambda call: True, sign)
    scaler.scale(sum((each**2).sum() for each in rows)).backward()
    scaler.step(optimizer)
    with pytest.raises(CorruptionError, match="is wrong"):
        checks.check_now()


# ---- clipping -------------------------------------------------------------------------------------------------------


def clipper(checks: UpdateChecks, stock: Callable[..., Any], scale: Any = lambda: None) -> Callable[..., Any]:
    return checks.clipping(stock, scale)


def judged(checks: UpdateChecks, *, can_repeat: bool = True) -> StepVerdict:
    return checks.judge([each.tolist() for each in checks.pending()], can_repeat=can_repeat)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clean_clipping_raises_no_alarm(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = parameters(dtype)
    checks = watched(torch.optim.AdamW(rows))
    clip = clipper(checks, torch.nn.utils.clip_grad_norm_)
    sizes = (1.0, 1e-3, 30.0) if dtype == torch.float16 else (1.0, 1e-9, 1e6)
    for step, size in enumerate(sizes * 6):
        for each in rows:
            each.grad = (torch.randn(each.shape, generator=generator) * size * (step % 5 != 4)).to(dtype)
        clip(rows, (1.0, 0.1, float("inf"))[step % 3])
        assert judged(checks) == StepVerdict.GO_ON, checks.failure
    assert counted(checks, "clipped") == 18 * 4 and counted(checks, "norms") == 18


def test_many_gradients_of_one_size_raise_no_alarm() -> None:
    """Their squares added one after another in float32 are 0.2 % off."""
    rows = parameters(torch.float32, shapes=[(64, 1024)] * 120)
    checks = watched(torch.optim.SGD(rows, lr=1e-3))
    for each in rows:
        each.grad = torch.full_like(each, 0.1)
    clipper(checks, torch.nn.utils.clip_grad_norm_)(rows, 1.0)
    assert judged(checks) == StepVerdict.GO_ON and counted(checks, "norms") == 1


@pytest.mark.parametrize("size", [6e4, 1.0])
def test_only_a_norm_that_float16_cannot_hold_may_be_infinite(size: float) -> None:
    rows = parameters(torch.float16)
    checks = watched(torch.optim.AdamW(rows))
    for each in rows:
        each.grad = torch.full_like(each, size)

    def stock(given: list[Any], norm: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(given, norm) + (0 if size > 1 else float("inf"))

    assert clipper(checks, stock)(rows, 1.0).isinf()
    assert judged(checks) == (StepVerdict.GO_ON if size > 1 else StepVerdict.REPEAT)


def unclipped(rows: list[Any], norm: float) -> Any:
    return torch.linalg.vector_norm(torch.cat([each.grad.flatten() for each in rows]))


def twice(rows: list[Any], norm: float) -> Any:
    found = torch.nn.utils.clip_grad_norm_(rows, norm)
    for each in rows:
        each.grad.mul_(0.5)
    return found


def wrong_norm(factor: float) -> Callable[..., Any]:
    def clip(rows: list[Any], norm: float) -> Any:
        found = torch.nn.utils.get_total_norm([each.grad for each in rows]) * factor
        torch.nn.utils.clip_grads_with_norm_(rows, norm, found)
        return found

    return clip


def turned(rows: list[Any], norm: float) -> Any:
    found = torch.nn.utils.clip_grad_norm_(rows, norm)
    for each in rows:
        each.grad.neg_()
    return found


def one_left_out(rows: list[Any], norm: float) -> Any:
    return torch.nn.utils.clip_grad_norm_(rows[1:], norm)


CLIPS = [unclipped, twice, turned, one_left_out, wrong_norm(0.5), wrong_norm(1.01), wrong_norm(float("nan"))]


@pytest.mark.parametrize("fault", CLIPS)
@pytest.mark.parametrize("always", [False, True])
def test_wrong_clipping_is_found_before_the_update(fault: Callable[..., Any], always: bool) -> None:
    """Once: the step is computed again, and then right; always: the run ends."""
    torch.manual_seed(5)
    rows = parameters(torch.float32)
    checks = watched(torch.optim.AdamW(rows))
    calls = itertools.count()
    clip = clipper(
        checks, lambda *given: (fault if always or next(calls) == 0 else torch.nn.utils.clip_grad_norm_)(*given)
    )
    found = []
    for _ in range(2):
        for each in rows:
            each.grad = torch.randn_like(each)
        clip(rows, 0.5)
        found.append(judged(checks))
    assert found == [StepVerdict.REPEAT, StepVerdict.END if always else StepVerdict.GO_ON]
    assert counted(checks, "disagreements") == 1 and counted(checks, "recovered") == (not always)
    assert not always or "instead of" in checks.failure


def test_wrong_clipping_that_cannot_be_repeated_ends_the_run() -> None:
    rows = parameters(torch.float32)
    checks = watched(torch.optim.AdamW(rows))
    for each in rows:
        each.grad = torch.randn_like(each)
    clipper(checks, unclipped)(rows, 0.5)
    assert judged(checks, can_repeat=False) == StepVerdict.END


@pytest.mark.parametrize("wrong", [False, True])
def test_a_scale_that_is_not_taken_out_is_found(wrong: bool) -> None:
    rows = parameters(torch.float32)
    optimizer = torch.optim.AdamW(rows)
    checks, scaler = watched(optimizer), Scaler()

    def stock(given: list[Any], norm: float) -> Any:
        if not wrong:
            scaler.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(given, norm)

    scaler.scale(sum((each**2).sum() for each in rows)).backward()
    clipper(checks, stock, lambda: scaler.scale(torch.ones(())))(rows, 0.5)
    assert judged(checks) == (StepVerdict.REPEAT if wrong else StepVerdict.GO_ON)


@pytest.mark.parametrize("factor", [1.0, 0.5, 1.001, float("nan")])
@pytest.mark.parametrize("at", [0, 1])
def test_a_loss_that_is_multiplied_with_another_scale_is_found(factor: float, at: int) -> None:
    """One of two micro-batches; the next step is right, with another scale."""
    rows = parameters(torch.float32)
    optimizer = torch.optim.AdamW(rows)
    scaler, losses = Scaler(), itertools.count()
    stock = scaler.scale

    def scale(outputs: Any) -> Any:
        wrong = outputs.requires_grad and next(losses) == at
        return stock(outputs) * (factor if wrong else 1.0)

    scaler.scale = scale  # type: ignore[method-assign]
    checks = watched(optimizer)
    checks.watch_scaler(scaler)

    def clipped(given: list[Any], norm: float) -> Any:
        scaler.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(given, norm)

    for step in range(2):
        for _ in range(2):
            scaler.scale(sum((each**2).sum() for each in rows)).backward()
        clipper(checks, clipped, lambda: scaler.scale(torch.ones(())))(rows, 0.5)
        assert judged(checks) == (StepVerdict.GO_ON if step or factor == 1.0 else StepVerdict.REPEAT)
        optimizer.zero_grad()
        scaler.update(7.0)


def test_large_gradients_have_their_norm_checked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_rocm_tune.train.update.clipping.NORM_BYTES", 1000)
    rows = parameters(torch.float32)
    every = -(-sum(4 * each.numel() for each in rows) // 1000)
    checks = watched(torch.optim.AdamW(rows))
    clip = clipper(checks, torch.nn.utils.clip_grad_norm_)
    for _ in range(2 * every):
        for each in rows:
            each.grad = torch.randn_like(each)
        clip(rows, 1.0)
        assert judged(checks) == StepVerdict.GO_ON
    assert counted(checks, "norms") == 2 and counted(checks, "clipped") == 8 * every


# ---- learning rates -------------------------------------------------------------------------------------------------

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("polynomial", {"power": 2.0}),
    ("cosine_with_min_lr", {"min_lr": 1e-5}),
    ("inverse_sqrt", {}),
]


def scheduled(kind: str, options: dict[str, Any], tmp: str) -> tuple[Any, Any, UpdateChecks]:
    args = TrainingArguments(
        output_dir=tmp, lr_scheduler_type=kind, warmup_steps=3, lr_scheduler_kwargs=options or None, report_to=[]
    )
    rows = parameters(torch.float32)
    optimizer = torch.optim.AdamW([{"params": rows[:2], "lr": 3e-4}, {"params": rows[2:]}], lr=1e-3)
    scheduler: Any = get_scheduler(
        kind, optimizer, num_warmup_steps=3, num_training_steps=12, scheduler_specific_kwargs=options or None
    )
    schedule = Schedule(scheduler, optimizer, args, 12, of_args=True, excused=False)
    return optimizer, scheduler, watched(optimizer, schedule)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_rates_of_a_schedule_raise_no_alarm(kind: str, options: dict[str, Any], tmp_path: Any) -> None:
    optimizer, scheduler, checks = scheduled(kind, options, str(tmp_path))
    assert checks.schedule is not None and checks.schedule.refusal is None
    for _ in range(14):
        train(optimizer, checks, 1)
        scheduler.step()


@pytest.mark.parametrize("kind", ["linear", "cosine", "inverse_sqrt"])
@pytest.mark.parametrize("wrong", [lambda rate: rate * 10, lambda rate: -rate, lambda rate: rate * 1.0001])
def test_a_rate_that_is_not_the_schedules_is_found_before_it_is_used(
    kind: str, wrong: Callable[[float], float], tmp_path: Any
) -> None:
    optimizer, scheduler, checks = scheduled(kind, {}, str(tmp_path))
    for _ in range(5):
        train(optimizer, checks, 1)
        scheduler.step()
    before = [each.detach().clone() for group in optimizer.param_groups for each in group["params"]]
    optimizer.param_groups[1]["lr"] = wrong(optimizer.param_groups[1]["lr"])
    with pytest.raises(CorruptionError, match=r"learning rate of group 1 is .* instead of .* \(update 6\)"):
        train(optimizer, checks, 1)
    assert all(map(torch.equal, before, [each for group in optimizer.param_groups for each in group["params"]])), (
        "it was not used"
    )


@pytest.mark.parametrize("scheduler", [SimpleNamespace(last_epoch=4), torch.optim.lr_scheduler.ReduceLROnPlateau])
def test_another_schedule_is_named_as_unchecked(scheduler: Any, tmp_path: Any) -> None:
    optimizer = torch.optim.AdamW(parameters(torch.float32))
    made = scheduler(optimizer) if isinstance(scheduler, type) else scheduler
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[])
    schedule = Schedule(made, optimizer, args, 9, of_args=True, excused=False)
    assert schedule.refusal is not None and "the schedule is" in schedule.refusal and schedule.wrong() is None
    own = LambdaLR(optimizer, lambda _: 1.0)
    assert "code of its own" in str(Schedule(own, optimizer, args, 9, of_args=True, excused=True).refusal)


NORM_ON_CARD = """
import torch
from torch import nn
from hf_rocm_tune.train.update import UpdateChecks
from hf_rocm_tune.transfer import TransferReport

torch.set_num_threads(1)
weight = nn.Parameter(torch.zeros(9_000_000, device="cuda"))
checks = UpdateChecks(TransferReport(), on=True)
checks.watch(torch.optim.SGD([weight], lr=1e-3), {})
clip = checks.clipping(torch.nn.utils.clip_grad_norm_, lambda: None)
weight.grad = torch.full_like(weight, 3e-3)
clip([weight], 1.0)
print(checks.judge([each.tolist() for each in checks.pending()], can_repeat=False).name, checks.failure)
"""


def test_many_gradients_of_one_size_are_no_fault_on_a_card_that_adds_them_in_sequence() -> None:
    """The simulated card computes norms with torch's code for processors, 0.3 % off here."""
    try:
        environment = {**os.environ, **simcard.environment()}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-c", NORM_ON_CARD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.strip() == "GO_ON", done.stdout + done.stderr[-2000:]
