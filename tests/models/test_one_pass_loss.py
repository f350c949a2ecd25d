"""TRL's fused head with its gradient computed in forward: the same values, a third less work."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models import loss
from hf_rocm_tune.models.loss import one_pass_loss

chunked_logprob = pytest.importorskip("trl.kernels.chunked_logprob", reason="TRL before 1.15 has no fused head")
OPTIONAL_OUTPUTS, ChunkedLogProbFunction = chunked_logprob.OPTIONAL_OUTPUTS, chunked_logprob.ChunkedLogProbFunction
TOKENS, HIDDEN, VOCABULARY = 70, 32, 300
OUTPUTS = ("log_probs", *OPTIONAL_OUTPUTS)
# chunk sizes: TRL's tile is wider than the vocabulary, or has 64 columns and ours 14 rows
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small tiles": {"chunk_size": 64},
    "one row a tile": {"chunk_size": 4},
    "bias": {"bias": True, "chunk_size": 64},
    "softcap, scale, temperature": {"softcap": 3.0, "scale": 0.7, "temperature": 1.3},
    "only what sft logs": {"outputs": ("entropy", "is_top1")},
}


@pytest.fixture(autouse=True)
def installed() -> None:
    """As a trainer does."""
    loss.install()


def head(
    *,
    dtype: torch.dtype = torch.float32,
    chunk_size: int = 32768,
    bias: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
    trained: bool = False,
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """What the head gives, by name, and the gradients of hidden states and weight. Half of the labels are likely."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_(trained)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    hidden[::2] += weight.detach()[targets[::2]]
    hidden = hidden.to(dtype).requires_grad_()
    added = torch.randn(VOCABULARY, generator=generator).to(dtype) if bias else None
    given = (targets, temperature, chunk_size, softcap, scale, outputs)
    results = ChunkedLogProbFunction.apply(hidden, weight, added, *given)
    (results[0] * torch.linspace(0.1, 1.0, TOKENS)).sum().backward()
    found = {name: each for name, each in zip(OUTPUTS, results, strict=True) if each is not None}
    return found, [hidden.grad, weight.grad]


def assert_close(ours: tuple[Any, Any], stock: tuple[Any, Any]) -> None:
    assert ours[0].keys() == stock[0].keys()
    for name, value in stock[0].items():
        torch.testing.assert_close(ours[0][name], value, rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(ours[1][0], stock[1][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradient_are_those_of_trl(case: str) -> None:
    stock = head(**CASES[case])
    with one_pass_loss():
        ours = head(**CASES[case])
    assert_close(ours, stock)
    assert not torch.equal(ours[1][0], stock[1][0]), "it was computed in another order"


def test_a_gradient_in_bfloat16_is_as_exact_as_that_of_trl() -> None:
    """Also where a label has nearly all of the probability, and the gradient is a small difference."""
    exact = head()[1][0]
    stock = head(dtype=torch.bfloat16)[1][0]
    with one_pass_loss():
        ours = head(dtype=torch.bfloat16)[1][0]
    errors = [(each.float() - exact).norm() / exact.norm() for each in (ours, stock)]
    assert errors[0] < 1.05 * errors[1] < 0.05


def test_a_third_of_the_products_is_saved() -> None:
    work = []
    for inside in (False, True):
        with FlopCounterMode(display=False) as counted:
            if inside:
                with one_pass_loss():
                    head()
            else:
                head()
        work.append(counted.get_total_flops())
    product = 2 * TOKENS * HIDDEN * VOCABULARY  # beside one in place on each side, which torch does not count
    assert work == [2 * product, product]


@pytest.mark.parametrize("left", [{}, {"trained": True}, {"dtype": torch.float16}])
def test_a_head_that_is_trained_float16_and_what_is_outside_the_block_are_left_to_trl(left: dict[str, Any]) -> None:
    stock = head(**left)
    with one_pass_loss():
        inside = head(**left)
    outside = head(**left)
    for found in (outside, *([inside] if left else [])):
        assert all(torch.equal(each, stock[0][name]) for name, each in found[0].items())
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found[1], stock[1], strict=True))


def test_a_gradient_of_the_entropy_is_refused() -> None:
    hidden, weight = torch.randn(4, HIDDEN, requires_grad=True), torch.randn(VOCABULARY, HIDDEN)
    with one_pass_loss():
        entropy = ChunkedLogProbFunction.apply(hidden, weight, None, torch.arange(4), 1.0, 32768)[1]
    with pytest.raises(NotImplementedError, match="--one_pass_loss"):
        entropy.sum().backward()


def test_off_a_card_the_whole_head_is_never_copied_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    stock = chunked_logprob._addmm_fp32
    monkeypatch.setattr(chunked_logprob, "_addmm_fp32", lambda a, b, c: (widths.append(len(c)), stock(a, b, c))[1])
    with one_pass_loss():
        head(chunk_size=64)
    assert max(widths) == 64


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_with_triton_s_kernels_too() -> None:
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    cases = ("small tiles", "softcap, scale, temperature")
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.test_one_pass_loss", *cases],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for case, line in zip(cases, done.stdout.splitlines()[-len(cases) :], strict=True):
        values, gradients = json.loads(line)
        stock = head(**CASES[case])
        found = {name: torch.tensor(values[name], dtype=each.dtype) for name, each in stock[0].items()}
        assert_close((found, [torch.tensor(gradients[0])]), stock)


@pytest.mark.parametrize("what", ["parameters", "helpers"])
def test_another_head_of_trl_is_refused_in_one_line(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "parameters":
        monkeypatch.setattr(ChunkedLogProbFunction, "forward", lambda ctx, hidden, weight, other: None)
    else:
        stock = ChunkedLogProbFunction.forward.__wrapped__
        monkeypatch.setattr(ChunkedLogProbFunction, "forward", staticmethod(stock))
        monkeypatch.delattr(chunked_logprob, "_forward_tile")
    with pytest.raises(UsageError, match=r"^--one_pass_loss does not know the fused head of TRL .*: give false$"):
        loss.install()


if __name__ == "__main__":
    loss.install()
    chunked_logprob._use_triton = lambda device: True
    for case in sys.argv[1:]:
        with one_pass_loss():
            found, gradients = head(**CASES[case])
        as_lists = [None if each is None else each.tolist() for each in gradients]
        print(json.dumps([{name: each.tolist() for name, each in found.items()}, as_lists]))
