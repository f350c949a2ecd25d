"""How the loss's gradient is multiplied: on an AMD card by what was fastest, with the same gradients."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hf_rocm_tune.models import loss, products
from tests import simcard

#: The simulated card under the name of an AMD card. Rates are given, not measured: a processor has none of its own.
EXPERIMENTS = """
import torch
from trl.kernels import chunked_logprob as head
from hf_rocm_tune.models import loss, products

card, stock = torch.device("cuda", 0), head._addmm_fp32
loss.fit_to(card, compiled=False)
assert head._addmm_fp32 is stock and not head._use_triton(card), "a card of another maker; Triton does not compile"
assert head.TOKEN_CHUNK_SIZE == 1024
torch.version.hip = "7.2.0"
products._SHAPES = products._SHAPES[:1]
measured = products.measure(card)
import os
os.environ["TORCH_BLAS_PREFER_HIPBLASLT"] = "0"
assert products.libraries() == ("rocBLAS",) and "hipBLASLt" not in products.measure(card), "off"
del os.environ["TORCH_BLAS_PREFER_HIPBLASLT"]
assert set(products.libraries()) == {"rocBLAS", "hipBLASLt"}
assert set(measured) >= {"rocBLAS", products.ROUNDED} and all(rate > 0 for rate in measured.values()), measured

def gradient(rates):
    products.choose.cache_clear()
    products.measure = lambda device: rates
    loss.fit_to(card, compiled=False)
    torch.manual_seed(0)
    hidden = torch.randn(40, 64, device=card).bfloat16().requires_grad_()
    weight, targets = torch.randn(3000, 64, device=card).bfloat16() / 8, torch.randint(3000, (40,), device=card)
    with loss.one_pass_loss():
        log_probs = head.ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 1024)[0]
    log_probs.sum().backward()
    asked.clear()
    return products.choose(card), hidden.grad.float()

asked, add = [], products.add
def watched(*tensors, library):
    asked.append(library)
    add(*tensors, library="rocBLAS" if library == "hipBLASLt" else library)  # which this build has not
products.add = watched
other, exact = gradient({"rocBLAS": 1.0, "hipBLASLt": 10.0, products.ROUNDED: 12.0})
assert (other.library, other.rounded) == ("hipBLASLt", False), other
rounded, close = gradient({"rocBLAS": 1.0, products.ROUNDED: 12.0})
assert (rounded.library, rounded.rounded) == ("rocBLAS", True), rounded
assert torch.allclose(close, exact, rtol=2**-6, atol=2**-9), (close - exact).abs().max()
assert head._addmm_fp32.stock is stock
total = torch.ones(4, 6, device=card)
head._addmm_fp32(total, torch.ones(4, 5, device=card).bfloat16(), torch.ones(5, 6, device=card).bfloat16())
assert asked == ["rocBLAS"] and bool((total == 6).all()), "sums over parts of the vocabulary are never rounded"
print(rounded.describe())
"""


@pytest.mark.skipif(not loss.is_known(), reason="TRL before 1.15 has no fused head")
def test_the_fastest_way_is_taken_and_gradients_are_the_same() -> None:
    try:
        environment = {**os.environ, **simcard.environment()}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    done = subprocess.run(
        [sys.executable, "-c", EXPERIMENTS], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == (
        "products of the loss gradient: bfloat16 result in the one-pass loss, else rocBLAS "
        "(TFLOP/s: rocBLAS 1, bfloat16 result 12)"
    )


@pytest.mark.parametrize(
    ("backend", "name"), [("Cublas", "rocBLAS"), ("Cublaslt", "hipBLASLt"), ("Default", "rocBLAS")]
)
def test_the_library_that_torch_prefers_is_told(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the value that torch itself returns: else a run that went over to hipBLASLt goes back at the next trial."""
    chosen = getattr(torch._C._BlasBackend, backend)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda *_: chosen)
    assert products.current_library(torch.device("cuda", 0)) == name
