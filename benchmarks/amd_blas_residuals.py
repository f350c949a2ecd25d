"""How near right products by AMD's libraries come to the bounds of the arithmetic checks; executed, not measured.

    python benchmarks/amd_blas_residuals.py [--parts bfloat16 nf4 ...] [--most MILLIONS] [--json FILE]

Frozen layers of 50 shapes that published models have, 128 to 14,336 wide, every third with a bias: forward and backward
of 32 rows of four kinds, as torch asks for them, by rocBLAS and hipBLASLt in turns (float32: rocBLAS alone), executed
as gfx1100 machine code on the simulated card, as are the checks' own products. 4-bit and 8-bit layers are those of
bitsandbytes, with its ROCm library's kernels and hipBLASLt's int8 ones. Of a layer with more weights than `--most` a
slice is computed: sums of the whole length, for as many of the outputs as there is room for. Experts are those of two
architectures, grouped, eager and batched.

`python -m tests.gfx1100.rocm_libs` fetches the libraries first. Figures are of their versions, which the result names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.amd_blas import EXECUTED, LIBRARIES, Log, Row, kind_of_kernel, machine, on_card, packages_or_exit

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = (
    (128, 128), (128, 512),
    (576, 576), (576, 192), (576, 1536), (1536, 576),  # SmolLM2-135M
    (896, 896), (896, 128), (896, 4864), (4864, 896),  # Qwen2.5-0.5B
    (960, 960), (960, 320), (960, 2560), (2560, 960),  # SmolLM2-360M
    (1024, 1024), (1024, 2048), (2048, 1024), (1024, 3072), (3072, 1024),  # Qwen3-0.6B
    (1152, 1024), (1152, 256), (1024, 1152), (1152, 6912), (6912, 1152),  # Gemma 3 1B
    (1536, 1536), (1536, 256), (1536, 8960), (8960, 1536),  # Qwen2.5-1.5B
    (2048, 2048), (2048, 512), (2048, 8192), (8192, 2048),  # Llama 3.2 1B
    (2048, 768), (768, 2048),  # an expert of Qwen3-30B-A3B
    (2560, 4096), (2560, 1024), (4096, 2560), (2560, 9728), (9728, 2560),  # Qwen3-4B
    (3072, 3072), (3072, 8192), (8192, 3072), (3072, 9216),  # Llama 3.2 3B, Phi-3
    (3584, 3584), (3584, 512),  # Qwen2.5-7B
    (4096, 4096), (4096, 1024), (4096, 6144), (4096, 14336), (14336, 4096),  # 8B models
)  # fmt: skip
"""Inputs and outputs."""
KINDS = ("normal", "positive", "outliers", "tokens")
EACH = 8
"""Rows of each kind."""
MOST = {"bfloat16": 64.0, "nf4": 2.0, "float32": 0.25, "int8": 1.0, "float16": 1.0}
"""Millions of weights of a layer that are executed."""
PARTS = (*MOST, "experts")


# ---- in the process with the card -------------------------------------------------------------------------------


def _inputs(columns: int, random: Any) -> Tensor:
    """`EACH` rows of each kind, float32 on the host."""
    import torch

    x = torch.randn(len(KINDS), EACH, columns, generator=random)
    positive, outliers, tokens = x[1], x[2], x[3]
    positive.abs_()
    outliers[:, torch.randint(0, columns, (max(1, columns // 512),), generator=random)] *= 300
    tokens *= torch.exp(2 * torch.randn(EACH, 1, generator=random))
    return x.flatten(0, 1)


def _module(part: str, weight: Tensor, bias: Tensor | None) -> Any:
    """A frozen layer on the card, of `weight` [out, in] and `bias` [out], float32 on the host."""
    import bitsandbytes as bnb
    import torch
    from torch import nn

    out, into = weight.shape
    module: Any
    if part == "nf4":
        module = bnb.nn.Linear4bit(into, out, bias is not None, compute_dtype=torch.bfloat16, quant_type="nf4")
        module.weight = bnb.nn.Params4bit(weight.bfloat16(), requires_grad=False, quant_type="nf4")
    elif part == "int8":
        module = bnb.nn.Linear8bitLt(into, out, bias is not None, has_fp16_weights=False, threshold=6.0)
        module.weight = bnb.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
    else:
        module = nn.Linear(into, out, bias is not None, device="meta")
        module.weight = nn.Parameter(weight.to(getattr(torch, part)))
    if bias is not None:
        module.bias = nn.Parameter(bias.to(_dtype(part)))
    return module.requires_grad_(False).train().cuda()


def _dtype(part: str) -> Any:
    """Of what goes through a layer."""
    import torch

    return {"nf4": torch.bfloat16, "int8": torch.float16}.get(part) or getattr(torch, part)


def _of_layers(part: str, most: float, chosen: list[tuple[int, int]], until: float) -> Iterator[Row]:
    for number, (into, out) in enumerate(SHAPES):
        if (into, out) not in chosen:
            continue
        for side in ("forward", "backward"):
            if time.monotonic() > until:
                return
            length, outputs = (into, out) if side == "forward" else (out, into)
            room = max(64, int(most * 1e6) // length // 64 * 64)
            yield _of_layer(part, number, side, length, min(outputs, room), outputs)


def _told(name: str) -> str:
    kind = kind_of_kernel(name)
    if kind["after"]:
        return "after split-K"
    return kind["tile"] + " WMMA" * kind["wmma"]


def _of_layer(part: str, number: int, side: str, length: int, outputs: int, of: int) -> Row:
    """One product: `length` of its sums, `outputs` of the `of` columns that the layer's result has."""
    import torch

    from hf_rocm_tune.train.arithmetic.products import Call
    from tests.gfx1100.amd_products import checked

    random = torch.Generator().manual_seed(number)
    rows, columns = (outputs, length) if side == "forward" else (length, outputs)
    weight = torch.randn(rows, columns, generator=random) * 0.02 + number % 2 * 0.01
    bias = torch.randn(rows, generator=random) * 0.1 if number % 3 == 0 else None
    module = _module(part, weight, bias)
    layer = checked(module)
    dtype = _dtype(part)
    log = Log()
    log.launches()
    wanted = LIBRARIES[(number + (side == "backward")) % 2] if part != "float32" else LIBRARIES[0]
    os.environ["TORCH_BLAS_PREFER_HIPBLASLT"] = str(int(wanted == "hipBLASLt"))
    x = _inputs(columns, random).to(dtype).cuda().requires_grad_(side == "backward")
    operand, result = x, module(x)
    if side == "backward":
        torch.cuda.synchronize()
        log.launches()
        operand = _inputs(rows, random).to(dtype).cuda()
        result.backward(operand)
        result = x.grad
    torch.cuda.synchronize()
    ran = [fields[1] for fields in log.launches()]
    call = Call(again=lambda each: each, biased=bias is not None)
    computed_in = layer.dtype_for(x, result)
    found = layer.residuals(side, operand.detach(), result.detach(), computed_in, call).cpu()
    products = [name for name in ran if name.startswith("Cijk_")]
    return {
        "part": part, "layer": SHAPES[number], "side": side, "sums of": length, "outputs": outputs, "of outputs": of,
        "bias": bias is not None, "prefers": wanted,
        "library": sorted({LIBRARIES["UserArgs" in name] for name in products if "PostGSU" not in name}),
        "kernels": ", ".join(map(_told, products)),
        "residual over bound": dict(zip(KINDS, found.view(len(KINDS), EACH).amax(1).tolist(), strict=True)),
        "largest": float(found.max()),
    }  # fmt: skip


def _wide_experts() -> Any:
    """Eight of the experts of a Qwen3-30B-A3B, bfloat16."""
    import torch
    from torch import nn
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=8, num_experts_per_tok=2)
            config._experts_implementation = "grouped_mm"
            self.experts: Any = Qwen3MoeExperts(config)
            self.router = torch.randn(2048, 8)

        def forward(self, x: Tensor) -> Tensor:
            weights, index = (x.detach().float() @ self.router).softmax(-1).topk(2)
            return self.experts(x, index, weights.to(x.dtype))

    mixture = Mixture()
    for weight in mixture.experts.parameters():
        weight.data = torch.randn(weight.shape) / weight.shape[-1] ** 0.5
    mixture.experts.requires_grad_(False).to(torch.bfloat16)
    return nn.ModuleList([mixture])


def _of_experts(only: str, until: float) -> Iterator[Row]:
    """Experts under the checks as they are, of whose products each row belongs to its expert."""
    import torch

    from benchmarks import arithmetic
    from hf_rocm_tune.train.arithmetic import ArithmeticChecks
    from hf_rocm_tune.transfer import Mover

    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    builders: dict[str, Callable[[], Any]] = {
        "eight of Qwen3-30B-A3B's, grouped, bfloat16": _wide_experts,
    }
    for kind in arithmetic.MIXTURES:
        title = f"small ones of two architectures, grouped, eager and batched: {kind}"
        builders[title] = partial(arithmetic.mixtures, kind, random)
    for name, build in builders.items():
        if time.monotonic() > until:
            return
        if only not in name:
            continue
        dtype = torch.float32 if "float32" in name else torch.bfloat16
        model = build().cuda()
        for mixture in model:
            mixture.router = mixture.router.cuda()
        mover = Mover(torch.device("cuda", 0))
        checks = ArithmeticChecks("every", mover)
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(torch_compile=False), is_sharded=False, get_tp_size=lambda: 1, model=model,
            accelerator=SimpleNamespace(mixed_precision="no"), streamer=None,
        )  # fmt: skip
        checks.prepare(trainer, lambda: None)
        checks.begin_step(1)
        log = Log()
        log.launches()
        for mixture in model:
            width = mixture.router.shape[0]
            x = _inputs(width, random).to(dtype).cuda().requires_grad_()
            mixture(x).backward(_inputs(width, random).to(dtype).cuda())
        verdict = checks.judge([row.tolist() for row in checks.pending()], can_repeat=True)
        ran = [fields[1] for fields in log.launches()]
        products = [each for each in ran if each.startswith("Cijk_")]
        sides = [side for product in checks._products for side in product.sides.values() if side.seen]
        yield {
            "part": "experts", "layer": name, "verdict": verdict.name, "products": len(products),
            "with WMMA": sum(kind_of_kernel(each)["wmma"] for each in products), "checked": len(sides),
            "largest": max(side.largest for side in sides),
        }  # fmt: skip
        mover.close()


# ---- in the process that was asked ------------------------------------------------------------------------------


def _shape(text: str) -> tuple[int, int]:
    into, out = map(int, text.split(","))
    return into, out


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on-card", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--most", type=float, metavar="MILLIONS", help=f"weights of a layer; by default {MOST}")
    parser.add_argument("--layers", nargs="+", type=_shape, metavar="IN,OUT", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--experts", default="", metavar="TEXT", help="only those whose name has this in it")
    parser.add_argument("--seconds", type=float, default=86400.0, help="after which no further product begins")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result goes here, also of what was interrupted")
    wanted = parser.parse_args()
    if wanted.on_card:
        until = time.monotonic() + wanted.seconds
        for part in wanted.parts:
            most = wanted.most or MOST.get(part, 0)
            for row in (
                _of_experts(wanted.experts, until)
                if part == "experts"
                else _of_layers(part, most, wanted.layers, until)
            ):
                print(json.dumps(row), flush=True)
        return
    packages = packages_or_exit()
    rows: list[Row] = []
    try:
        for row in on_card(__file__, sys.argv[1:]):
            rows.append(row)
            where = f"{row['layer']} {row.get('side', '')} {row.get('outputs', '')} {row.get('library', '')}"
            print(f"{row['part']:8s} {where}: {row['largest']:.4f}", flush=True)
    finally:
        largest = {
            part: max(mine, key=lambda row: row["largest"])
            for part in PARTS
            if (mine := [row for row in rows if row["part"] == part])
        }
        for part, row in largest.items():
            print(f"largest of {part}: {row['largest']:.3f} of {row['layer']}, {row.get('side', '')}")
        found = {
            "note": EXECUTED,
            "machine": machine(),
            "packages": packages,
            "command": sys.argv,
            "products": {part: sum(row["part"] == part for row in rows) for part in largest},
            "largest": largest,
            "rows": rows,
        }
        if wanted.json is not None:
            wanted.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
