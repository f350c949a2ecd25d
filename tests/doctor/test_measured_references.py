"""What the checks of arithmetic compare with: right by autograd in float64, and with bounds that mean something."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from hf_rocm_tune.doctor.measured.attention_bounds import NAMES, attention
from hf_rocm_tune.doctor.measured.attention_cases import Case, cases
from hf_rocm_tune.doctor.measured.layer_bounds import cross_entropy, normalised, softmax
from hf_rocm_tune.doctor.measured.nf4_reference import LEVELS, accept_undecided, quantise, ternary, unpack, values_of
from hf_rocm_tune.doctor.measured.rounding import (
    SMALLEST,
    Reference,
    accumulation,
    exact_factors,
    gamma,
    product,
    roundoff,
    spread,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def generator(seed: int = 0) -> torch.Generator:
    """Random numbers that are the same each time."""
    return torch.Generator().manual_seed(seed)


def assert_right(reference: Reference, by_autograd: Tensor) -> None:
    """The reference has the value, and a bound that is finite and not below nothing."""
    torch.testing.assert_close(reference.right, by_autograd, rtol=1e-10, atol=1e-12)
    assert reference.bound.shape == reference.right.shape
    assert bool((reference.bound > 0).all()) and bool(reference.bound.isfinite().all())


# ---- sums --------------------------------------------------------------------------------------------------------


def test_the_roundoffs_are_those_of_the_formats() -> None:
    assert [roundoff(dtype) for dtype in DTYPES] == [2.0**-24, 2.0**-11, 2.0**-8]
    assert gamma(10, 2.0**-8) == pytest.approx(10 / 256 / (1 - 10 / 256))


@given(seed=st.integers(0, 10_000), k=st.integers(1, 300), reverse=st.booleans(), blocked=st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_order_of_float32_sums_leaves_the_bound(seed: int, k: int, reverse: bool, blocked: bool) -> None:
    left, right = (spread(size, torch.bfloat16, generator(seed)) for size in ((3, k), (k, 3)))
    terms = (left.float()[:, :, None] * right.float()[None]).unbind(1)
    order: Iterator[Tensor] = reversed(terms) if reverse else iter(terms)
    parts = [torch.zeros(3, 3) for _ in range(4 if blocked else 1)]
    for number, term in enumerate(order):
        parts[number % len(parts)] += term
    total = torch.stack(parts).sum(0).to(torch.bfloat16).double()
    reference = product(left.double(), right.double(), torch.bfloat16)
    assert bool(((total - reference.right).abs() <= reference.bound).all())


@given(seed=st.integers(0, 10_000), k=st.integers(1, 64))
@settings(max_examples=40, deadline=None)
def test_a_matrix_unit_that_cuts_off_stays_in_the_bound(seed: int, k: int) -> None:
    """Groups of 4 products and the sum so far, aligned to the largest and cut off at 24 bits, as tensor cores do it."""
    left, right = (spread((k,), torch.float16, generator(seed)).double() for _ in range(2))
    products = torch.nn.functional.pad(left * right.roll(1), (0, -k % 4)).view(-1, 4)
    total = torch.zeros((), dtype=torch.float64)
    for group in products:
        addends = torch.cat((group, total[None]))
        unit = 2.0 ** (math.floor(math.log2(float(addends.abs().max()))) - 23)
        total = _cut((addends / unit).trunc().sum() * unit)
    exact = (left * right.roll(1)).sum()
    assert abs(float(total - exact)) <= accumulation(k) * float((left * right.roll(1)).abs().sum())


def _cut(value: Tensor) -> Tensor:
    """Towards zero to 24 bits."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * 2**24).trunc() / 2**24, exponent)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 7, 256, 257, 2048, 4096])
def test_exact_factors_leave_nothing_to_round(dtype: torch.dtype, k: int) -> None:
    left, right = exact_factors(5, k, 3, dtype, generator())
    largest = float((left.double().abs() @ right.double().abs()).max())
    assert largest <= 1 / roundoff(dtype), "every partial sum, in any order, is an integer that the format holds"
    assert bool((left != 0).any()) and bool((left @ right).isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_not_so_small_that_their_products_may_be_flushed(dtype: torch.dtype) -> None:
    values = spread((100_000,), dtype, generator())
    assert float(values.abs().min()) >= SMALLEST and torch.finfo(dtype).tiny <= SMALLEST**2
    assert bool((values < 0).any()) and bool((values > 0).any())


# ---- attention ---------------------------------------------------------------------------------------------------


def _by_autograd(case: Case) -> dict[str, Tensor]:
    inputs = [tensor.double().requires_grad_() for tensor in case.inputs]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        output = functional.scaled_dot_product_attention(*inputs, attn_mask=case.mask, **case.options)
    return dict(zip(NAMES, (output, *torch.autograd.grad(output, inputs, case.upstream.double())), strict=True))


@pytest.mark.parametrize("number", range(6))
def test_attention_in_float64_is_what_autograd_makes_of_it(number: int) -> None:
    case = list(cases(torch.bfloat16, generator(), full=False))[number]
    right = _by_autograd(case)
    for name in NAMES:
        if number == 0:  # sharp: what the other keys still give is left out, and is far below the bound
            torch.testing.assert_close(case.right[name].right, right[name].detach(), rtol=1e-9, atol=1e-9)
        else:
            assert_right(case.right[name], right[name].detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_bounds_of_attention_tell_nothing_from_something(dtype: torch.dtype) -> None:
    """A result of zeros is beyond the bound almost everywhere, or the check would see little."""
    for case in cases(dtype, generator(), full=False):
        for name in NAMES:
            reference = case.right[name]
            seen = (reference.right.abs() > reference.bound).double().mean()
            assert seen > 0.6 or not bool(reference.right.any()), (case.name, name, float(seen))


def test_a_hidden_key_has_no_part_in_anything() -> None:
    inputs = [spread((1, 1, 6, 8), torch.float32, generator(seed)).double() for seed in range(4)]
    inputs[2:] = [tensor.sign() for tensor in inputs[2:]]
    hidden = torch.zeros(6, 6, dtype=torch.bool)
    hidden[:, 4:] = True
    references = attention(inputs[0], inputs[1], inputs[2], inputs[3], hidden, torch.float32)
    for name in NAMES[2:]:
        assert not bool(references[name].right[:, :, 4:].any())
        assert float(references[name].bound[:, :, 4:].max()) < 1e-30


# ---- layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [True, False])
def test_normalisation_in_float64_is_what_autograd_makes_of_it(dtype: torch.dtype, centred: bool) -> None:
    x, upstream, weight, bias = (spread(size, dtype, generator()).double() for size in ((5, 33), (5, 33), 33, 33))
    inputs = [x.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if centred else [])]
    layer = functional.layer_norm if centred else functional.rms_norm
    output = layer(inputs[0], (33,), *inputs[1:], eps=1e-5)
    gradients = torch.autograd.grad(output, inputs, upstream)
    with torch.no_grad():
        found = normalised(x, weight, bias if centred else None, upstream, 1e-5, dtype, centred=centred)
    for reference, right in zip(found.values(), (output, *gradients), strict=True):
        assert_right(reference, right.detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_and_cross_entropy_in_float64_are_what_autograd_makes_of_them(dtype: torch.dtype) -> None:
    x, upstream = (spread((5, 33), dtype, generator(seed)).double() for seed in (0, 1))
    target = torch.randint(0, 33, (5,), generator=generator())
    x.requires_grad_()
    for output, weight, found in (
        (x.softmax(-1), upstream, softmax(x.detach(), upstream, dtype)),
        (functional.cross_entropy(x, target), torch.tensor(1.0).double(), cross_entropy(x.detach(), target, dtype)),
    ):
        (gradient,) = torch.autograd.grad(output, x, weight)
        assert_right(found["output"], output.detach())
        assert_right(found["input"], gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bounds_of_layers_tell_nothing_from_something(dtype: torch.dtype) -> None:
    x, upstream, weight, bias = (spread(size, dtype, generator()).double() for size in ((9, 512), (9, 512), 512, 512))
    for name, reference in normalised(x, weight, bias, upstream, 1e-5, dtype, centred=True).items():
        assert float((reference.right.abs() > reference.bound).double().mean()) > 0.8, name


# ---- NF4 ---------------------------------------------------------------------------------------------------------


def test_the_levels_are_the_published_ones() -> None:
    """Quantiles of the normal distribution, as QLoRA's appendix E derives them, scaled to -1 and 1, and a zero."""
    from statistics import NormalDist

    top, normal = 0.9677083, NormalDist()
    positive = [normal.inv_cdf(top + (0.5 - top) * step / 8) for step in range(8)]
    negative = [-normal.inv_cdf(top + (0.5 - top) * step / 7) for step in range(7)]
    levels = torch.tensor(sorted([*positive, *negative, 0.0]), dtype=torch.float64) / positive[0]
    torch.testing.assert_close(LEVELS, levels, rtol=0, atol=2e-7)


def test_every_element_gets_the_nearest_level() -> None:
    tensor = torch.randn(4, 128, generator=generator())
    found = quantise(tensor, 64)
    errors = (tensor.double() - found.values).view(-1, 64).abs()
    others = (tensor.double().view(-1, 64, 1) - LEVELS * found.absmax.double()[:, None, None]).abs().amin(-1)
    torch.testing.assert_close(errors, others, rtol=0, atol=1e-12)
    assert torch.equal(found.values, values_of(found.packed, found.absmax, 64, (4, 128)))
    assert int(unpack(found.packed)[0]) == int(found.packed[0]) >> 4, "the first of two stands in the upper half"


def test_a_quotient_in_the_middle_may_go_either_way_and_no_third() -> None:
    block = LEVELS.float().repeat(4)
    block[3] = float((LEVELS[10] + LEVELS[11]) / 2)
    found = quantise(block, 64)
    numbers = unpack(found.packed)
    for number, taken in ((10, True), (11, True), (9, False), (12, False)):
        numbers[3] = number
        said = ((numbers[::2] << 4) | numbers[1::2]).to(torch.uint8)
        assert torch.equal(accept_undecided(said, found), said) is taken
    assert torch.equal(accept_undecided(found.packed ^ 0x10, found), found.packed), "decided ones stay as they are"


def test_products_with_a_ternary_weight_are_exact_in_every_dtype() -> None:
    weight = ternary(32, 512, 64, generator())
    assert set(weight.values.unique().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert float(weight.values.abs().sum(1).max()) <= 1 / roundoff(torch.bfloat16)
