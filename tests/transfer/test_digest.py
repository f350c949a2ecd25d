"""The digest against an independent reference, and against the ways in which bytes go wrong."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import Digest, combine, digest, digest_on_device
from tests.transfer.digest_reference import BLOCK, reference, weight

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def device_digest(tensor: torch.Tensor, word_offset: int = 0) -> Digest:
    s1, s2 = digest_on_device(tensor, word_offset).tolist()
    return Digest(s1 % 2**64, s2 % 2**64, tensor.numel() * tensor.element_size())


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.one_of(st.integers(0, 2**33), st.integers(BLOCK - 80, BLOCK + 80)))
def test_host_and_device_equal_the_reference(data: bytes, word_offset: int) -> None:
    expected = reference(data, word_offset)
    assert digest(tensor_of(data), word_offset=word_offset) == expected
    assert device_digest(tensor_of(data), word_offset) == expected


@pytest.mark.parametrize("size", [4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 9 * BLOCK + 3])
@pytest.mark.parametrize("word_offset", [0, 5, BLOCK - 1, 3 * BLOCK])
def test_across_blocks_equals_the_reference(size: int, word_offset: int) -> None:
    data = random.Random(size).randbytes(size)
    expected = reference(data, word_offset)
    assert digest(tensor_of(data), word_offset=word_offset) == expected
    assert device_digest(tensor_of(data), word_offset) == expected


def test_device_chunks_of_many_blocks_equal_the_host() -> None:
    data = torch.randint(0, 256, (70 * 4 * BLOCK + 5,), dtype=torch.uint8)
    assert device_digest(data, 17) == digest(data, word_offset=17)
    assert device_digest(data) == digest(data)


def test_low_32_bits_of_the_weights_are_a_bijection_on_sampled_blocks() -> None:
    blocks = [0, 1, 2, 77, 2**15, 2**16 - 1]
    seen = {weight(block * BLOCK + low) % 2**32 for block in blocks for low in range(BLOCK)}
    assert len(seen) == len(blocks) * BLOCK


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_gives_the_digest_of_its_bytes(dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    data = random.Random(1).randbytes(size * 13) if dtype is not torch.bool else bytes([1, 0] * 6 + [1])
    tensor = torch.empty(0, dtype=dtype).set_(tensor_of(data).untyped_storage(), 0, (13,), (1,))
    assert digest(tensor) == device_digest(tensor) == reference(data)
    assert digest(tensor.reshape(13, 1)) == reference(data)


def test_strided_input_is_read_in_logical_order() -> None:
    base = torch.randn(40, 50, 30)
    for view in (base.permute(2, 0, 1), base[:, ::3], base[:: -0 or 2, 1:, ::7], base[0, 0, 0].expand(70001), base.mT):
        expected = digest(view.contiguous(), word_offset=3)
        assert digest(view, word_offset=3) == expected
        assert device_digest(view, 3) == expected
    narrow = torch.randint(0, 9, (301, 5), dtype=torch.uint8)[:, 1:4]
    assert digest(narrow) == digest(narrow.contiguous())


def test_unaligned_storage_parameters_and_inference_tensors() -> None:
    raw = torch.randint(0, 256, (4 * BLOCK + 9,), dtype=torch.uint8)
    for start in (1, 2, 3):
        assert digest(raw[start:]) == device_digest(raw[start:]) == digest(raw[start:].clone())
    weight_ = torch.nn.Parameter(torch.randn(5, 3))
    with torch.inference_mode():
        inside = weight_ * 1
        first = digest(inside)
    assert first == digest(inside) == digest(weight_) == digest(weight_.data)
    assert digest(torch.empty(0)) == Digest(0, 0, 0)
    assert digest(torch.tensor(2.5)) == digest(torch.tensor([2.5]))


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=400), st.lists(st.integers(0, 100), max_size=5), st.integers(0, 2**20))
def test_additive_over_any_split(data: bytes, cuts: list[int], word_offset: int) -> None:
    places = [0, *sorted(min(4 * cut, len(data)) for cut in cuts), len(data)]
    parts = [digest(tensor_of(data[a:b]), word_offset=word_offset + -(-a // 4)) for a, b in itertools.pairwise(places)]
    assert combine(parts) == digest(tensor_of(data), word_offset=word_offset)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_single_bit_flip_is_caught(data: bytes, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, 8 * len(data) - 1))
    wrong = bytearray(data)
    wrong[place // 8] ^= 1 << place % 8
    assert digest(tensor_of(bytes(wrong))) != digest(tensor_of(data))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=80), st.data())
def test_any_swap_of_two_different_words_is_caught(words: list[int], draw: st.DataObject) -> None:
    i, j = draw.draw(st.integers(0, len(words) - 1)), draw.draw(st.integers(0, len(words) - 1))
    swapped = list(words)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    same = digest(torch.tensor(words, dtype=torch.int32)) == digest(torch.tensor(swapped, dtype=torch.int32))
    assert same == (words == swapped)


def test_what_simple_checksums_miss_is_caught() -> None:
    mask = torch.ones(8, 64, dtype=torch.int64)
    assert digest(mask) != digest(torch.zeros_like(mask))  # the XOR of an even number of ones is that of zeros
    outer, inner = torch.tensor([1, 0, 0, 1]), torch.tensor([0, 1, 1, 0])
    assert digest(outer) != digest(inner)  # equal plain and equal position-weighted sums
    tokens = torch.randint(0, 1000, (2, 512))
    assert digest(tokens) != digest(tokens.roll(1))
    assert digest(tokens) != digest(tokens.flip(0))
    assert digest(tokens) != digest(torch.randint(0, 1000, (2, 512)))
    zeroed = tokens.clone()
    zeroed.view(-1)[100:140] = 0
    assert digest(tokens) != digest(zeroed)
    assert digest(torch.zeros(4)) != digest(torch.zeros(5))


def test_swapped_blocks_of_equal_sum_are_caught() -> None:
    first = torch.randint(0, 2, (BLOCK,), dtype=torch.int32)
    second = first[torch.randperm(BLOCK)]
    assert digest(torch.cat((first, second))) != digest(torch.cat((second, first)))


def test_hex_round_trip_and_bad_text() -> None:
    value = digest(torch.randn(100))
    assert Digest.from_hex(value.hex()) == value
    with pytest.raises(UsageError, match="is not a digest"):
        Digest.from_hex("xyz")
