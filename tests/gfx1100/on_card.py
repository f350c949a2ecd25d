"""Experiments on the simulated card, its kernels executed as gfx1100 machine code.

`python -m tests.gfx1100.on_card sample|full NAME...` prints a JSON line for each case: the experiment, the case, and
the distances that were found. `tests/gfx1100/test_kernels.py` runs them and says what they may be.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CARD = torch.device("cuda", 0)
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Row = dict[str, Any]


def distance(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm."""
    found, exact = found.detach().cpu().double(), exact.detach().cpu().double()
    return float((found - exact).norm() / exact.norm().clamp_min(1e-300))


def differ(found: Tensor, exact: Tensor) -> int:
    """Elements that are not equal."""
    return int((found.cpu() != exact.cpu()).sum())


# ---- the digest -------------------------------------------------------------------------------------------------


def digests(full: bool) -> Iterator[Row]:
    """The kernel's sums against the host's: lengths, addresses, borders of blocks, skews."""
    from hf_rocm_tune.transfer import digest_triton
    from hf_rocm_tune.transfer.digest import BLOCK_WORDS, DigestReadback, digest

    numbers = random.Random(0)
    lengths = [0, 1, 3, 4, 15, 16, 17, 4095, 4099, 4 * BLOCK_WORDS - 1, 4 * BLOCK_WORDS + 5]
    starts = [0, 1, 4, 16]
    offsets = [0, 1, BLOCK_WORDS - 3, 5 * BLOCK_WORDS]
    if full:
        lengths += [31, 33, 1 << 20, (1 << 20) + 13, *(numbers.randrange(1 << 22) for _ in range(12)), 1 << 22]
        starts = list(range(16))
        offsets += [2**33 + BLOCK_WORDS - 701, 2**46]
    cases = list(itertools.product(lengths, starts, offsets))
    cases = [
        case for case in cases if case[0] < 1 << 16 or case[1:] == (0, 0) or numbers.random() < (0.1 if full else 0.2)
    ]
    if full:
        cases += [(64 << 20, 0, 0), ((96 << 20) + 3, 4, 0), ((128 << 20) - 5, 16, 70_001)]
    room = torch.randint(0, 256, (max(case[0] for case in cases) + 64,), dtype=torch.uint8)
    on_card = room.to(CARD)
    for length, start, offset in cases:
        sums = torch.zeros(2, dtype=torch.int64, device=CARD)
        digest_triton.triton_sums(on_card[start : start + length], offset, sums)
        readback = DigestReadback(sums)
        readback.join()
        same = readback.digests([length]) == [digest(room[start : start + length].clone(), word_offset=offset)]
        yield {"case": f"{length} bytes from {start} at word {offset}", "wrong": int(not same)}
    (compiled, *_), *_ = digest_triton.digest_kernel.device_caches.values()
    yield {"case": "specialised variants", "wrong": 0, "variants": len(compiled)}


# ---- bitsandbytes -----------------------------------------------------------------------------------------------


def _codes(packed: Tensor) -> Tensor:
    flat = packed.cpu().flatten()
    return torch.stack((flat >> 4, flat & 15), 1).flatten().long()


def _excess(values: Tensor, codes: Tensor, table: Tensor) -> float:
    """How much farther the chosen entries are than the nearest ones."""
    apart = (values[:, None] - table[None]).abs()
    return float((apart.gather(1, codes[:, None])[:, 0] - apart.min(1).values).max())


def quantised(full: bool) -> Iterator[Row]:
    """4 and 8 bits there and back: the nearest entry of the format's table, and the table times the statistics."""
    from bitsandbytes import functional as bnb

    torch.manual_seed(0)
    sizes = (32, 64, 128, 256, 512, 1024, 2048, 4096) if full else (32, 64, 256)
    for name, kind, size in itertools.product(FLOATS, ("nf4", "fp4"), sizes):
        for count in (8192, 1500) if full else (1500,):
            values = torch.randn(count).to(FLOATS[name])
            packed, state = bnb.quantize_4bit(values.to(CARD), blocksize=size, quant_type=kind)
            back = bnb.dequantize_4bit(packed, state).cpu()
            other = bnb.dequantize_4bit(*bnb.quantize_4bit(values, blocksize=size, quant_type=kind))
            table = bnb.get_4bit_type(kind, device="cpu")
            blocks = functional.pad(values.float(), (0, -count % size)).view(-1, size)
            largest = blocks.abs().amax(1)
            codes = _codes(packed)[:count]
            scale = largest.repeat_interleave(size)[:count]
            yield {
                "case": f"{kind} {name} {size} of {count}",
                "statistics": differ(state.absmax, largest),
                "excess": _excess(values.float() / scale, codes, table),
                "definition": differ(back, (table[codes] * scale).to(FLOATS[name])),
                "cpu share": differ(back, other) / count,
            }
    for name, size in itertools.product(FLOATS, sizes[1:]):
        values, code = torch.randn(3000).to(FLOATS[name]), bnb.create_dynamic_map()
        found, state = bnb.quantize_blockwise(values.to(CARD), code.to(CARD), blocksize=size)
        largest = functional.pad(values.float(), (0, -3000 % size)).view(-1, size).abs().amax(1)
        scale = largest.repeat_interleave(size)[:3000]
        back = bnb.dequantize_blockwise(found, state).cpu()
        yield {
            "case": f"8-bit {name} {size}",
            "statistics": differ(state.absmax, largest),
            "excess": _excess(values.float() / scale, found.cpu().long(), code),
            "definition": differ(back, (code[found.cpu().long()] * scale).to(back.dtype)),
        }
    for kind, size in itertools.product(("nf4", "fp4"), sizes):
        values = torch.randn(96, 512)
        packed, state = bnb.quantize_4bit(values.to(CARD), blocksize=size, quant_type=kind, compress_statistics=True)
        absmax, nested = state.absmax.cpu().long(), state.state2
        statistics = nested.code.cpu()[absmax] * nested.absmax.cpu().repeat_interleave(nested.blocksize)[: len(absmax)]
        statistics = statistics + state.offset.cpu()
        table = bnb.get_4bit_type(kind, device="cpu")
        exact = (table[_codes(packed)] * statistics.repeat_interleave(size)).view(96, 512)
        back = bnb.dequantize_4bit(packed, state).cpu()
        other = bnb.dequantize_4bit(
            *bnb.quantize_4bit(values, blocksize=size, quant_type=kind, compress_statistics=True)
        )
        yield {"case": f"nested {kind} {size}", "excess": distance(back, exact), "cpu distance": distance(back, other)}


def products(full: bool) -> Iterator[Row]:
    """Products with 4-bit weights, fused for few rows and dequantised for more, against float64."""
    import bitsandbytes
    from bitsandbytes import functional as bnb

    torch.manual_seed(0)
    shapes = ((96, 512), (256, 192)) if full else ((96, 512),)
    rows = (1, 2, 3, 4, 5, 8, 9, 33, 128) if full else (1, 4, 33)
    for name, kind, nested, (out, width) in itertools.product(FLOATS, ("nf4", "fp4"), (False, True), shapes):
        for size, count in itertools.product((32, 64, 128) if full else (64,), rows):
            if width % size:
                continue
            weight = torch.randn(out, width).to(FLOATS[name])
            packed, state = bnb.quantize_4bit(
                weight.to(CARD), blocksize=size, quant_type=kind, compress_statistics=nested
            )
            left = torch.randn(count, width).to(FLOATS[name])
            bias = torch.randn(out).to(FLOATS[name])
            found = bitsandbytes.matmul_4bit(left.to(CARD), packed.t(), state, bias=bias.to(CARD))
            exact = left.double() @ bnb.dequantize_4bit(packed, state).cpu().double().t() + bias.double()
            case = f"{name} {kind}{' nested' * nested} {size}, {count} by {out} by {width}"
            yield {"case": case, name: distance(found, exact)}


def eight_bit(full: bool) -> Iterator[Row]:
    """int8: rows quantised, products (on the CPU, in place of hipBLASLt), the result scaled back."""
    from bitsandbytes import functional as bnb

    torch.manual_seed(0)
    for rows, width, threshold in itertools.product(
        (1, 37) if full else (37,), (64, 256, 4096) if full else (256,), (0.0, 6.0)
    ):
        values = torch.randn(rows, width).half()
        values[0, 7] = 9
        found, largest, columns = bnb.int8_vectorwise_quant(values.to(CARD), threshold=threshold)
        kept = values.float()
        kept = kept.masked_fill(kept.abs() >= threshold, 0) if threshold else kept
        exact = torch.round(kept * (127 / kept.abs().amax(1, keepdim=True)))
        if columns is not None:
            exact[:, columns.cpu()] = 0
        yield {
            "case": f"rows of {rows} by {width} above {threshold}",
            "statistics": differ(largest, kept.abs().amax(1)),
            "steps": float((found.cpu().float() - exact).abs().max()),
        }
        weight = torch.randint(-127, 128, (96, width), dtype=torch.int8)
        sums = bnb.int8_linear_matmul(found, weight.to(CARD))
        scales = torch.rand(96) + 0.1
        scaled = bnb.int8_mm_dequant(sums, largest, scales.to(CARD))
        wanted = (found.cpu().int() @ weight.int().t()).double()
        yield {"case": f"product of {rows} by {width}", "statistics": differ(sums, wanted.int()), "steps": 0.0}
        wanted *= largest.cpu().double()[:, None] * scales.double() / 127**2
        yield {"case": f"scaled back {rows} by {width}", "float16": distance(scaled, wanted)}


def _plain_step(name: str, p: Tensor, g: Tensor, memory: dict[str, Tensor], step: int, rate: float) -> None:
    """One step of an optimizer with bitsandbytes' defaults, in float64, nothing quantised."""
    first = memory.setdefault("first", torch.zeros_like(p))
    second = memory.setdefault("second", torch.zeros_like(p))
    if name.startswith(("Adam", "AdamW", "PagedAdamW")):
        first.mul_(0.9).add_(g, alpha=0.1)
        second.mul_(0.999).addcmul_(g, g, value=0.001)
        if "W" in name:
            p.mul_(1 - rate * 0.01)
        p -= rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    elif name.startswith("Lion"):
        p -= rate * (0.9 * first + 0.1 * g).sign()
        first.mul_(0.99).add_(g, alpha=0.01)
    elif name.startswith("SGD"):
        first.copy_(g if step == 1 else 0.9 * first + g)
        p -= rate * first
    elif name.startswith("RMSprop"):
        first.mul_(0.99).addcmul_(g, g, value=0.01)
        p -= rate * g / (first.sqrt() + 1e-8)
    else:
        first.addcmul_(g, g)
        p -= rate * g / (first.sqrt() + 1e-10)


def optimizers(full: bool) -> Iterator[Row]:
    """Steps of bitsandbytes' optimizers: what they changed, against their CPU backend and the formula."""
    from bitsandbytes import optim

    names = [
        "Adam8bit",
        "AdamW8bit",
        "PagedAdamW8bit",
        "AdamW",
        "PagedAdamW32bit",
        "Lion8bit",
        "SGD8bit",
        "RMSprop8bit",
        "Adagrad8bit",
    ]
    for name, dtype in itertools.product(
        names if full else names[1:2], ("float32", "bfloat16") if full else ("float32",)
    ):
        generator = torch.Generator().manual_seed(1)
        begin = torch.randn(9000, generator=generator).to(FLOATS[dtype])
        copies = [begin.to(device, copy=True).requires_grad_() for device in (CARD, torch.device("cpu"))]
        more = {"momentum": 0.9} if name.startswith("SGD") else {}
        stepping = [getattr(optim, name)([copy], lr=1e-2, **more) for copy in copies]
        exact, memory = begin.double(), {}
        for step in range(1, 6):
            gradient = (torch.randn(9000, generator=generator) + 0.2).to(FLOATS[dtype])
            for copy, each in zip(copies, stepping, strict=True):
                copy.grad = gradient.to(copy.device)
                each.step()
            _plain_step(name, exact, gradient.double(), memory, step, 1e-2)
        changed = [copy.detach().cpu().double() - begin.double() for copy in copies]
        kind = "8-bit" if "8bit" in name else "32-bit"
        yield {
            "case": f"{name} {dtype}",
            f"{kind} {dtype} cpu": distance(changed[0], changed[1]),
            f"{kind} {dtype} formula": distance(changed[0], exact - begin.double()),
        }


# ---- losses and layers ------------------------------------------------------------------------------------------


def heads(full: bool) -> Iterator[Row]:
    """TRL's fused head and the one-pass loss, forward and backward, against the CPU's in float64."""
    from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProbFunction

    from hf_rocm_tune.models import loss

    loss.install()
    cases: dict[str, dict[str, Any]] = {
        "only what sft logs": {"outputs": ("entropy", "is_top1")},
        "plain": {},
        "small tiles": {"chunk": 64},
        "bias": {"bias": True, "chunk": 64},
        "softcap, scale, temperature": {"softcap": 3.0, "scale": 0.7, "temperature": 1.3},
        "wide vocabulary": {"vocabulary": 5000, "chunk": 2048},
    }

    def head(device: torch.device, dtype: torch.dtype, once: bool, vocabulary: int = 300, chunk: int = 32768,
             bias: bool = False, softcap: float | None = None, scale: float = 1.0, temperature: float = 1.0,
             outputs: tuple[str, ...] = OPTIONAL_OUTPUTS) -> list[Tensor]:  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(vocabulary, 32, generator=generator).bfloat16()
        targets = torch.randint(0, vocabulary, (70,), generator=generator)
        hidden = torch.randn(70, 32, generator=generator).bfloat16()
        hidden[::2] += weight[targets[::2]]
        hidden = hidden.to(device, dtype).requires_grad_()
        added = torch.randn(vocabulary, generator=generator).bfloat16().to(device, dtype) if bias else None
        with loss.one_pass_loss() if once else contextlib.nullcontext():
            results = ChunkedLogProbFunction.apply(
                hidden, weight.to(device, dtype), added, targets.to(device), temperature, chunk, softcap, scale, outputs
            )
            (results[0] * torch.linspace(0.1, 1.0, 70, device=device)).sum().backward()
        assert hidden.grad is not None
        return [*(each.detach().float() for each in results if each is not None), hidden.grad]

    for name, once, case in itertools.product(
        ("float32", "bfloat16"), (False, True), cases if full else list(cases)[:1]
    ):
        *found, gradient = head(CARD, FLOATS[name], once, **cases[case])
        *exact, exact_gradient = head(torch.device("cpu"), torch.float32, once, **cases[case])
        *_, cpu_gradient = head(torch.device("cpu"), FLOATS[name], once, **cases[case])
        yield {
            "case": f"{name}, {'one pass' if once else 'TRL'}, {case}",
            f"{name} value": max(map(distance, found, exact)),
            f"{name} gradient": distance(gradient, exact_gradient),
            f"{name} gradient on the CPU": distance(cpu_gradient, exact_gradient),
        }


def liger(full: bool) -> Iterator[Row]:
    """Liger's kernels, forward and backward, against plain torch in float64."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    torch.manual_seed(0)
    targets = torch.randint(0, 1500, (23,))
    targets[3] = -100
    angles = torch.arange(9)[:, None] / 10000 ** (torch.arange(0, 32, 2) / 32)
    angles = torch.cat((angles, angles), 1)[None]

    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * angles.cos()[:, None] + torch.cat((-high, low), -1) * angles.sin()[:, None]

    pairs: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = {
        "RMSNorm": (
            lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
            lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
            (torch.randn(3, 17, 96), torch.randn(96)),
        ),
        "rotary": (
            lambda q, k: LigerRopeFunction.apply(q.clone(), k.clone(), angles.cos().to(CARD), angles.sin().to(CARD)),
            lambda q, k: (turned(q), turned(k)),
            (torch.randn(2, 4, 9, 32), torch.randn(2, 2, 9, 32)),
        ),
        "SwiGLU": (
            lambda a, b: LigerSiLUMulFunction.apply(a.clone(), b.clone()),
            lambda a, b: functional.silu(a) * b,
            (torch.randn(5, 7, 100), torch.randn(5, 7, 100)),
        ),
        "cross entropy": (
            lambda x: LigerCrossEntropyFunction.apply(
                x.clone(), targets.to(CARD), None, -100, 0.0, 0.0, "mean", None, False
            )[0],
            lambda x: functional.cross_entropy(x, targets),
            (torch.randn(23, 1500),),
        ),
        "fused cross entropy": (
            lambda x, w: LigerFusedLinearCrossEntropyFunction.apply(x, w, targets.to(CARD))[0],
            lambda x, w: functional.cross_entropy(x @ w.t(), targets),
            (torch.randn(23, 64), torch.randn(1500, 64) * 0.2),
        ),
    }
    for name, (case, (ours, plain, tensors)) in itertools.product(
        ("float32", "bfloat16"), pairs.items() if full else []
    ):
        given = [each.to(CARD, FLOATS[name]).requires_grad_() for each in tensors]
        exact = [each.to(FLOATS[name]).double().requires_grad_() for each in tensors]
        results, wanted = ours(*given), plain(*exact)
        results, wanted = (each if isinstance(each, tuple) else (each,) for each in (results, wanted))
        for values in (results, wanted):
            sum(
                (each.double() * torch.linspace(0.1, 1, each.numel(), device=each.device).view(each.shape)).sum()
                for each in values
            ).backward()
        yield {
            "case": f"{case} {name}",
            f"{name} value": max(map(distance, results, wanted)),
            f"{name} gradient": max(distance(a.grad, b.grad) for a, b in zip(given, exact, strict=True)),
        }


EXPERIMENTS = {each.__name__: each for each in (digests, quantised, products, eight_bit, optimizers, heads, liger)}

if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        for row in EXPERIMENTS[chosen](sys.argv[1] == "full"):
            print(json.dumps({"experiment": chosen, **row}), flush=True)
