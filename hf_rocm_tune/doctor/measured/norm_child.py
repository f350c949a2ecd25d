"""The child's half of ``norm``: normalisation, embedding, softmax and cross entropy, forward and backward, by dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_rocm_tune.doctor.measured.layer_bounds import cross_entropy, normalised, softmax
from hf_rocm_tune.doctor.measured.rounding import Reference, name_of, spread
from hf_rocm_tune.doctor.measured.tally import Tally
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import Mover

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = ((33, 1000), (7, 4096), (1, 63))
FULL_SIZES = ((512, 4096), (129, 11008))
CLASSES = 32_003
FULL_CLASSES = 128_256
_EPS = 1e-5
_WORDS, _WIDTH, _PICKS = 211, 96, 300


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the layers.

    Args:
        request: ``device``, ``address``; ``full``: larger sizes too; ``seed``; ``fault``, see `tally`.

    Returns:
        See `Tally.result`.
    """
    device = device_of(request)
    tally = Tally(request)
    generator = torch.Generator().manual_seed(request.get("seed", 0))
    full = bool(request.get("full"))
    with Mover(device) as mover:
        bench = _Bench(mover, tally, generator)
        for dtype in DTYPES:
            for size in SIZES + FULL_SIZES if full else SIZES:
                bench.norms(dtype, size)
            bench.softmax(dtype)
            bench.embedding(dtype)
            bench.cross_entropy(dtype, FULL_CLASSES if full else CLASSES)
    return tally.result()


class _Bench:
    """Layers on one device."""

    def __init__(self, mover: Mover, tally: Tally, generator: torch.Generator) -> None:
        self._mover, self._tally, self._generator = mover, tally, generator

    def norms(self, dtype: torch.dtype, size: tuple[int, int]) -> None:
        """LayerNorm with weight and bias, RMSNorm with weight."""
        x, weight, bias, upstream = (self._values(shape, dtype) for shape in (size, size[1:], size[1:], size))
        for centred in (True, False):
            parameters = [weight, bias] if centred else [weight]
            double = [tensor.double() for tensor in (x, weight, bias, upstream)]
            right = normalised(
                double[0],
                double[1],
                double[2] if centred else None,
                double[3],
                _EPS,
                dtype,
                centred=centred,
                narrow_sums=self._mover.device.type == "cpu",
            )
            name = f"{name_of(dtype)} {'LayerNorm' if centred else 'RMSNorm'} of {size[0]} rows of {size[1]}"
            self._run(name, _layer_norm if centred else _rms_norm, [x, *parameters], upstream, right)

    def softmax(self, dtype: torch.dtype) -> None:
        """Softmax over an odd width."""
        x, upstream = self._values((33, 1001), dtype), self._values((33, 1001), dtype)
        right = softmax(x.double(), upstream.double(), dtype)
        self._run(f"{name_of(dtype)} softmax", lambda inputs: inputs[0].softmax(-1), [x], upstream, right)

    def cross_entropy(self, dtype: torch.dtype, classes: int) -> None:
        """Mean cross entropy over a vocabulary."""
        x = self._values((17, classes), dtype)
        target = torch.randint(0, classes, (17,), generator=self._generator)
        placed = self._mover.move(target, name="target")
        right = cross_entropy(x.double(), target, dtype)
        upstream = torch.ones((), dtype=dtype)
        name = f"{name_of(dtype)} cross entropy of {classes} classes"
        self._run(name, lambda inputs: functional.cross_entropy(inputs[0], placed), [x], upstream, right)

    def embedding(self, dtype: torch.dtype) -> None:
        """A look-up and the sum of gradients by row, exact in any order: fewer than 256 ones and minus ones each."""
        table = self._values((_WORDS, _WIDTH), dtype)
        picks = torch.randint(0, _WORDS, (_PICKS,), generator=self._generator)
        upstream = (torch.randint(0, 2, (_PICKS, _WIDTH), generator=self._generator) * 2 - 1).to(dtype)
        right = torch.zeros(_WORDS, _WIDTH).index_add(0, picks, upstream.float()).to(dtype)
        name = f"{name_of(dtype)} embedding"
        step(f"computing {name}")
        weight = self._mover.move(table, name=name).requires_grad_()
        output = functional.embedding(self._mover.move(picks, name=name), weight)
        output.backward(self._mover.move(upstream, name=name))
        self._tally.exact(f"{name}: output", output, table[picks])
        assert weight.grad is not None
        self._tally.exact(f"{name}: gradient of the table", weight.grad, right, gradient=True)

    def _run(
        self,
        name: str,
        layer: Callable[[Sequence[Tensor]], Tensor],
        inputs: Sequence[Tensor],
        upstream: Tensor,
        right: Mapping[str, Reference],
    ) -> None:
        """One layer; ``right`` has the output and the gradients of ``inputs``, in that order."""
        step(f"computing {name}")
        placed = [self._mover.move(tensor, name=name).requires_grad_() for tensor in inputs]
        try:
            output = layer(placed)
            gradients = torch.autograd.grad(output, placed, self._mover.move(upstream, name=name))
        except RuntimeError as error:  # every device has these: a refusal is a fault of the installation
            self._tally.refused(name, error)
            return
        for (what, reference), result in zip(right.items(), (output, *gradients), strict=True):
            label = f"{name}: {what if what == 'output' else f'gradient of {what}'}"
            self._tally.close(label, result, reference, gradient=what != "output")

    def _values(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return spread(size, dtype, self._generator)


def _layer_norm(inputs: Sequence[Tensor]) -> Tensor:
    return functional.layer_norm(inputs[0], inputs[0].shape[-1:], inputs[1], inputs[2], eps=_EPS)


def _rms_norm(inputs: Sequence[Tensor]) -> Tensor:
    return functional.rms_norm(inputs[0], inputs[0].shape[-1:], inputs[1], eps=_EPS)
