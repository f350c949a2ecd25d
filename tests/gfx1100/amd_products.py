"""Products of the simulated card by AMD's libraries, against float64, as JSON lines; for `test_amd_blas.py`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm_tune.train.arithmetic.checksums import HostWeights
from hf_rocm_tune.train.arithmetic.products import Call, Product, frozen_products

CARD = torch.device("cuda", 0)
Row = dict[str, object]


def cases(kind: torch.dtype) -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:
    """A name, a product on the card, and what it is in float64."""
    torch.manual_seed(3)
    m, k, n, batches = 37, 65, 131, 3
    host = {
        "x": torch.randn(m, k), "w": torch.randn(n, k), "row": torch.randn(n), "y": torch.randn(m, n),
        "a": torch.randn(batches, m, k), "b": torch.randn(batches, k, n), "c": torch.randn(batches, m, n),
        "wide": torch.randn(m, 2 * k),
    }  # fmt: skip
    host = {name: value.to(kind) for name, value in host.items()}
    on = {name: value.to(CARD) for name, value in host.items()}
    x, w, row, y, a, b, c, wide = (value.double() for value in host.values())
    X, W, ROW, Y, A, B, C, WIDE = on.values()
    yield "forward", lambda: torch.mm(X, W.t()), x @ w.T
    yield "backward", lambda: torch.mm(Y, W), y @ w
    yield "gradient", lambda: torch.mm(Y.t(), X), y.T @ x
    yield "linear with a bias", lambda: torch.nn.functional.linear(X, W, ROW), x @ w.T + row
    yield "a bias and factors", lambda: torch.addmm(ROW, X, W.t(), beta=0.5, alpha=2), 2 * (x @ w.T) + row / 2
    yield "added", lambda: torch.addmm(Y, X, W.t(), beta=-1), x @ w.T - y
    yield "added in place", lambda: Y.clone().addmm_(X, W.t(), alpha=0.5), 0.5 * (x @ w.T) + y
    yield "every other column", lambda: torch.mm(WIDE[:, ::2], W.t()), wide[:, ::2] @ w.T
    yield "a part of the columns", lambda: torch.mm(WIDE[:, :k], W.t()), wide[:, :k] @ w.T
    out = torch.empty(n, m, dtype=kind, device=CARD).t()
    yield "into columns", lambda: torch.mm(X, W.t(), out=out), x @ w.T
    yield "batched", lambda: torch.bmm(A, B), a @ b
    yield "batched, transposed", lambda: torch.bmm(A.transpose(1, 2), C), a.transpose(1, 2) @ c
    yield "batched, one for all", lambda: torch.bmm(A, B[:1].expand(batches, k, n)), a @ b[:1]
    yield "batched and added", lambda: torch.baddbmm(C, A, B, beta=0.5, alpha=2), 2 * (a @ b) + c / 2
    yield "heads", lambda: torch.matmul(A.view(batches, 1, m, k), B.view(batches, 1, k, n)).view(batches, m, n), a @ b
    # Rows of each group begin at multiples of 16 bytes; the second group has no rows.
    tokens, weights = torch.randn(m, 64).to(kind), torch.randn(batches, 128, 64).to(kind)
    ends = torch.tensor([5, 5, m], dtype=torch.int32).to(CARD)
    TOKENS, WEIGHTS = tokens.to(CARD), weights.to(CARD)
    groups = torch.cat([tokens[:5].double() @ weights[0].double().T, tokens[5:].double() @ weights[2].double().T])
    yield "grouped", lambda: torch._grouped_mm(TOKENS, WEIGHTS.mT, offs=ends), groups
    if kind != torch.float32:
        yield "to float32", lambda: torch.mm(X, W.t(), out_dtype=torch.float32), x @ w.T


class Copies(HostWeights):
    """Checksums of weights whose copies nobody verifies."""

    def __init__(self) -> None:
        mover: Any = SimpleNamespace(move_to=lambda device, tensor, **_: tensor.to(device))
        super().__init__(mover)

    def verified_copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()


def checked(module: nn.Module) -> Product:
    """A frozen layer on the card as the arithmetic checks have it."""
    weights = Copies()
    (layer,) = frozen_products(nn.ModuleList([module]), computed_in=None)
    weights.compute([layer])
    weights.place([layer])
    torch.cuda.synchronize()
    return layer


def residual(kind: torch.dtype) -> float:
    """Of the forward product of a layer, over the bound of the checks."""
    torch.manual_seed(4)
    module = nn.Linear(65, 131, bias=False, device="meta")
    module.weight = nn.Parameter((torch.randn(131, 65) * 0.1).to(kind).to(CARD))
    layer = checked(module.requires_grad_(False))
    x = torch.randn(37, 65).to(kind).to(CARD)
    return float(layer.residuals("forward", x, module(x), kind, Call(again=module)).max())


def integers() -> Iterator[Row]:
    """Products of bitsandbytes' 8-bit layers, which its library hands on to hipBLASLt; every sum is exact."""
    from bitsandbytes import functional as bnb

    for rows, inner, columns in ((37, 128, 96), (130, 200, 36)):
        x, w = (torch.randint(-127, 128, (size, inner), dtype=torch.int8) for size in (rows, columns))
        found = bnb.int8_linear_matmul(x.to(CARD), w.to(CARD)).cpu()
        wrong = int((found != x.int() @ w.int().t()).sum())
        yield {"case": f"{rows} by {inner} by {columns}", "dtype": "int8", "hipblaslt": True, "wrong": wrong}


def main() -> None:
    """Every case in each dtype that is asked for, by what torch prefers and by hipBLASLt; or ``int8``."""
    for name in sys.argv[1:]:
        if name == "int8":
            for row in integers():
                print(json.dumps(row), flush=True)
            continue
        kind = getattr(torch, name)
        for prefers in ("0", "1") if kind != torch.float32 else ("0",):
            os.environ["TORCH_BLAS_PREFER_HIPBLASLT"] = prefers
            for case, multiply, exact in cases(kind):
                row: Row = {"case": case, "dtype": name, "hipblaslt": prefers == "1"}
                try:
                    found = multiply().cpu().double()
                    row["distance"] = float((found - exact).norm() / exact.norm())
                except RuntimeError as error:
                    row["error"] = str(error)
                print(json.dumps(row), flush=True)
            row = {"case": "checked", "dtype": name, "hipblaslt": prefers == "1", "residual": residual(kind)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
