"""What a layer's checks have learned of clean products holds for other data, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_rocm_tune.train.arithmetic.checks import ArithmeticChecks
from hf_rocm_tune.train.arithmetic.products import Call, Product, frozen_products
from hf_rocm_tune.train.arithmetic.verdict import StepVerdict
from hf_rocm_tune.transfer import Mover

INNER, OUTER, ROWS = 2048, 64, 16


def checked(dtype: torch.dtype) -> tuple[ArithmeticChecks, Product, nn.Linear]:
    """Checks of one layer whose weights are all positive."""
    module = nn.Linear(INNER, OUTER, bias=False).to(dtype).requires_grad_(False)
    module.weight.copy_(torch.rand(OUTER, INNER) * 0.02)
    (layer,) = frozen_products(nn.Sequential(module), computed_in=None)
    checks = ArithmeticChecks("every", Mover(torch.device("cpu")))
    checks._products, checks._due = [layer], [layer]
    checks._send_checksums()
    return checks, layer, module


def summed(x: Tensor, weight: Tensor) -> Tensor:
    """A right product in float32 whose kernel adds one after the other."""
    found = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        found += x[:, k, None].float() * weight[:, k].float()
    return found.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_another_kind_are_no_fault(dtype: torch.dtype) -> None:
    """Sums that stay small round less than sums of one sign: no step is repeated when those come."""
    torch.manual_seed(0)
    checks, layer, module = checked(dtype)
    call = Call(again=lambda operand: operand)

    def step(x: Tensor) -> StepVerdict:
        checks._check(layer, "forward", x, summed(x, module.weight), dtype, call)
        numbers = [each.tolist() for each in checks.pending()]
        return checks.judge(numbers, can_repeat=True)

    for _ in range(30):
        assert step(torch.randn(ROWS, INNER).to(dtype)) is StepVerdict.GO_ON
    level = layer.sides["forward"].level
    assert level < 1, "what was learned tightens the bound"
    assert step(torch.rand(ROWS, INNER).to(dtype)) is StepVerdict.GO_ON
    wrong = torch.randn(ROWS, INNER).to(dtype)
    right = summed(wrong, module.weight)
    right[3, 5] += 0.05 * right[3].norm()
    checks._check(layer, "forward", wrong, right, dtype, call)
    assert checks.judge([each.tolist() for each in checks.pending()], can_repeat=True) is StepVerdict.REPEAT
