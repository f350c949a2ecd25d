"""The digest against an independent reference, and against the ways in which bytes go wrong; C is as plain torch."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import Digest, QueuedDigests, TensorGroup, combine, digest, digest_on_device
from hf_rocm_tune.transfer.digest import BYTES_A_THREAD, HostSums, plain_sums
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


@pytest.mark.parametrize(
    ("size", "word_offset"), [(4 * BLOCK + 1, 0), (4 * BLOCK, 3 * BLOCK), (9 * BLOCK + 3, BLOCK - 1)]
)
def test_across_blocks_equals_the_reference(size: int, word_offset: int) -> None:
    data = random.Random(size).randbytes(size)
    expected = reference(data, word_offset)
    assert digest(tensor_of(data), word_offset=word_offset) == expected
    assert device_digest(tensor_of(data), word_offset) == expected


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=9))
def test_together_is_one_tensor_padded_to_words(pieces: list[bytes]) -> None:
    together = TensorGroup([tensor_of(piece) for piece in pieces])
    padded = b"".join(piece + bytes(-len(piece) % 4) for piece in pieces)
    expected = replace(reference(padded, 0), nbytes=sum(map(len, pieces)))
    assert QueuedDigests([together, together.parts[0]]).result() == [expected, reference(pieces[0])]


class Views(TorchDispatchMode):
    """Counts views as another dtype."""

    made = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), more: Any = None) -> Any:
        self.made += function is torch.ops.aten.view.dtype
        return function(*given, **(more or {}))


def test_views_of_a_group_are_made_once() -> None:
    together = TensorGroup([torch.zeros(4 * size, dtype=torch.uint8) for size in range(1, 9)])
    with Views() as views:
        for _ in range(3):
            together.joined()
    assert views.made == 3  # of what was joined, not of each tensor


def test_device_chunks_of_many_blocks_equal_the_host() -> None:
    data = torch.randint(0, 256, (70 * 4 * BLOCK + 5,), dtype=torch.uint8)
    assert device_digest(data, 17) == digest(data, word_offset=17)
    assert device_digest(data) == digest(data)


def test_low_32_bits_of_the_weights_are_a_bijection_on_sampled_blocks() -> None:
    blocks = [0, 77, 2**16 - 1]
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


digest_host = sys.modules["hf_rocm_tune.transfer.digest"]  # the package has a function of that name


@pytest.fixture(scope="module")
def native() -> HostSums:
    function, reason = digest_host.load_native()
    if function is None:
        pytest.skip(reason)
    return function


@pytest.fixture
def choose_afresh() -> Iterator[None]:
    digest_host._chosen_on_host.cache_clear()
    yield
    digest_host._chosen_on_host.cache_clear()


def both(native: HostSums, data: torch.Tensor, index: int) -> tuple[int, int]:
    """Without a copy and with one, at an address of its own, with guards around it."""
    result = native(data, index, None)
    guarded = torch.full((data.numel() + 48,), 7, dtype=torch.uint8)
    for sums in (native, plain_sums):
        assert sums(data, index, None) == result
        for offset in (16, 16 - guarded.data_ptr() % 16, 19):
            guarded.fill_(7)
            copy = guarded[offset : offset + data.numel()]
            assert sums(data, index, copy) == result
            assert torch.equal(copy, data)
            assert bool((guarded[:offset] == 7).all()) and bool((guarded[offset + data.numel() :] == 7).all())
    return result


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 5), st.one_of(st.integers(0, 2**33), st.integers(BLOCK - 80, BLOCK)))
def test_small_data_at_any_address_equal_the_reference(native: HostSums, data: bytes, start: int, index: int) -> None:
    tensor = torch.frombuffer(bytearray(bytes(8) + data + bytes(1)), dtype=torch.uint8)[8 - start : 8 + len(data)]
    expected = reference(bytes(start) + data, index)
    assert both(native, tensor, index) == (expected.s1, expected.s2)


@pytest.mark.parametrize("size", [4 * BLOCK - 1, 9 * BLOCK + 3])
@pytest.mark.parametrize("index", [0, 3 * BLOCK - 1, (2**32 - 1) * BLOCK])
def test_across_blocks_equal_the_reference(native: HostSums, size: int, index: int) -> None:
    data = random.Random(size).randbytes(size)
    expected = reference(data, index)
    assert both(native, torch.frombuffer(bytearray(data), dtype=torch.uint8), index) == (expected.s1, expected.s2)


@pytest.mark.parametrize(("size", "index"), [(2 * BYTES_A_THREAD, 0), (3 * BYTES_A_THREAD + 4097, 3 * BLOCK - 5)])
def test_several_threads_give_the_sums_of_one(native: HostSums, size: int, index: int) -> None:
    both(native, torch.randint(0, 256, (size,), dtype=torch.uint8), index)
    both(native, torch.full((size,), 255, dtype=torch.uint8), index)  # the largest words: no carry is lost


@pytest.mark.usefixtures("choose_afresh")
def test_compiled_once_and_again_for_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert digest_host.host_method().name == "native"
    (library,) = digest_host.cache_directory().iterdir()
    made = library.stat().st_mtime_ns
    assert digest_host.load_native()[0] is not None
    assert library.stat().st_mtime_ns == made
    changed = tmp_path / "changed.c"
    changed.write_text(digest_host.SOURCE.read_text() + "\n")
    monkeypatch.setattr(digest_host, "SOURCE", changed)
    assert digest_host.load_native()[0] is not None
    assert len(list(digest_host.cache_directory().iterdir())) == 2


@pytest.mark.usefixtures("choose_afresh")
@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("no compiler", "no C compiler"),
        ("broken library", "OSError"),
        ("source does not compile", "error|#error"),
        ("library without the function", "AttributeError"),
    ],
)
def test_falls_back_to_torch_and_says_why(
    obstacle: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    needs_compiler = obstacle != "no compiler"
    if needs_compiler and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.delenv("CC", raising=False)
    source = tmp_path / "other.c"
    if obstacle == "no compiler":
        monkeypatch.setenv("CC", "no-such-compiler")
    elif obstacle == "broken library":
        monkeypatch.setattr(digest_host, "_compile", lambda _, library: _write_rubbish(library))
    else:
        source.write_text("#error no\n" if obstacle.startswith("source") else "int other;\n")
        monkeypatch.setattr(digest_host, "SOURCE", source)
    function, said = digest_host.load_native()
    assert function is None
    method = digest_host.host_method()
    assert method.name == "torch" and method.reason == said and "\n" not in said
    assert re.search(reason, said)
    nine = torch.arange(9, dtype=torch.uint8)
    assert digest_host.digest(nine, word_offset=3) == digest_host.Digest(*plain_sums(nine, 3), 9)


def _write_rubbish(library: Path) -> None:
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF and no more")


@pytest.mark.usefixtures("choose_afresh")
@pytest.mark.parametrize(
    ("right", "other"),
    [
        ("0x846CA68Bu", "0x846CA68Du"),
        ("memcpy(to + done, from + done, nbytes - done);", ""),
        ("memcpy(p->copy + (data - p->data), data, p->nbytes % 4);", "return NULL;"),
        ("copy ? copy + begin : NULL", "copy"),
    ],
    ids=["sums", "end-of-a-piece", "tail", "threads-over-each-other"],
)
def test_a_library_with_other_sums_or_copies_is_refused(
    right: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wrong = tmp_path / "wrong.c"
    source = digest_host.SOURCE.read_text()
    assert right in source
    wrong.write_text(source.replace(right, other))
    monkeypatch.setattr(digest_host, "SOURCE", wrong)
    method = digest_host.host_method()
    assert method.name == "torch" and method.reason.startswith("other sums than plain torch")
