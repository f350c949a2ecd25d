"""The host's digest: C and plain torch are the same function, and without a usable C library nothing breaks."""

from __future__ import annotations

import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_rocm_tune.transfer import digest_host
from hf_rocm_tune.transfer.digest_host import BYTES_A_THREAD, HostSums, torch_sums, with_table
from tests.transfer.digest_reference import BLOCK, reference


@pytest.fixture(scope="module")
def native() -> HostSums:
    function, reason = digest_host.load_native()
    if function is None:
        pytest.skip(reason)
    return with_table(function)


@pytest.fixture(autouse=True)
def choose_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_host, "_choice", None)


def both(native: HostSums, data: torch.Tensor, index: int) -> tuple[int, int]:
    """Without a copy and with one, at an address of its own, with guards around it."""
    result = native(data, index, None)
    guarded = torch.full((data.numel() + 48,), 7, dtype=torch.uint8)
    for sums in (native, torch_sums):
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


@pytest.mark.parametrize("size", [4 * BLOCK - 1, 4 * BLOCK, 9 * BLOCK + 3])
@pytest.mark.parametrize("index", [0, 5, 3 * BLOCK - 1, (2**32 - 1) * BLOCK])
def test_across_blocks_equal_the_reference(native: HostSums, size: int, index: int) -> None:
    data = random.Random(size).randbytes(size)
    expected = reference(data, index)
    assert both(native, torch.frombuffer(bytearray(data), dtype=torch.uint8), index) == (expected.s1, expected.s2)


@pytest.mark.parametrize("size", [2 * BYTES_A_THREAD, 3 * BYTES_A_THREAD + 4097, 5 * BYTES_A_THREAD - 1])
@pytest.mark.parametrize("index", [0, 3 * BLOCK - 5])
def test_several_threads_give_the_sums_of_one(native: HostSums, size: int, index: int) -> None:
    both(native, torch.randint(0, 256, (size,), dtype=torch.uint8), index)


def test_largest_words_in_every_place_do_not_lose_a_carry(native: HostSums) -> None:
    both(native, torch.full((4 * BLOCK * 9 + 7,), 255, dtype=torch.uint8), BLOCK // 2)


def test_threads_do_not_disturb_each_other(native: HostSums) -> None:
    pieces = [torch.randint(0, 256, (300_000 + k,), dtype=torch.uint8) for k in range(12)]
    expected = [torch_sums(piece, k) for k, piece in enumerate(pieces)]
    for sums in (native, torch_sums):
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(sums, pieces, range(12), [None] * 12)) == expected


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux's /proc")
def test_no_temporary_of_the_size_of_the_tensor(native: HostSums) -> None:
    data = torch.ones(48 << 20, dtype=torch.uint8)
    for sums in (native, torch_sums):
        sums(data[:1000], 0, None)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is in use now
        before = _peak_kib()
        sums(data, 0, None)
        assert _peak_kib() - before < 8 << 10


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


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


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("no compiler", "no C compiler"),
        ("failing compiler", "failed: no message"),
        ("cache is a file", "NotADirectoryError|FileExistsError"),
        ("broken library", "OSError"),
        ("source does not compile", "error|#error"),
        ("library without the function", "AttributeError"),
    ],
)
def test_falls_back_to_torch_and_says_why(
    obstacle: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    needs_compiler = obstacle.startswith(("cache", "broken", "source", "library"))
    if needs_compiler and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.delenv("CC", raising=False)
    source = tmp_path / "other.c"
    if obstacle == "no compiler":
        monkeypatch.setenv("CC", "no-such-compiler")
    elif obstacle == "failing compiler":
        monkeypatch.setenv("CC", "false")
    elif obstacle == "cache is a file":
        (tmp_path / "hf_rocm_tune").write_text("")
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
    assert digest_host.host_sums(torch.arange(9, dtype=torch.uint8), 3) == torch_sums(torch.arange(9).byte(), 3)


def _write_rubbish(library: Path) -> None:
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF and no more")


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
