"""Canaries: memory that was right and is no longer, found in the first bad cycle and described as it is."""

from __future__ import annotations

import pytest
import torch

from hf_rocm_tune.doctor import canaries
from hf_rocm_tune.doctor.canaries import CHURN, Canaries, CanaryFault, CanarySettings, watch
from hf_rocm_tune.errors import UsageError

CPU = torch.device("cpu")
SMALL = CanarySettings(canaries=3, canary_bytes=5 << 20, churn_bytes=1 << 20, cycles=6)
BYTES = SMALL.canary_bytes


def harm_at(cycle: int, canary: int, first: int, bytes_: torch.Tensor) -> CanaryFault | None:
    """Runs the test and writes bytes into a canary in one cycle."""

    def harm(now: int, watched: Canaries) -> None:
        if now == cycle:
            watched.blocks[canary].view(torch.uint8)[first : first + bytes_.numel()] = bytes_

    return watch(CPU, SMALL, on_cycle=harm)


def test_memory_that_holds_gives_no_alarm() -> None:
    cycles: list[int] = []
    assert watch(CPU, SMALL, on_cycle=lambda cycle, _: cycles.append(cycle)) is None
    assert cycles == list(range(1, SMALL.cycles + 1))


def test_no_word_of_the_pattern_is_zero_nan_or_found_in_another_canary() -> None:
    blocks = Canaries(CPU, SMALL).blocks
    for block in blocks:
        assert bool((block != 0).all())
        assert bool(block.view(torch.float32).isfinite().all())
    assert not torch.equal(blocks[0], blocks[1])
    words = blocks[0].long()
    pairs = ((words[:-1] << 32) | (words[1:] & 0xFFFFFFFF)).sort().values
    assert bool((pairs[1:] != pairs[:-1]).all())


@pytest.mark.parametrize(("first", "length"), [(0, 4), (4096, 2 << 20), (BYTES - 1, 1), (3, 2), ((4 << 20) - 7, 40)])
def test_a_zeroed_range_is_found_in_its_cycle_where_it_is(first: int, length: int) -> None:
    fault = harm_at(4, 1, first, torch.zeros(length, dtype=torch.uint8))
    assert fault is not None
    assert (fault.cycle, fault.canary, fault.stable) == (4, 1, True)
    assert fault.kind == "zeros"
    # A word of the pattern is not zero, but a byte of it at either end of the range may be.
    assert first <= fault.first_offset < first + 4
    assert first + length - 4 < fault.first_offset + fault.length <= first + length
    assert fault.first_offset % fault.alignment == 0


def test_what_stands_there_instead_is_named() -> None:
    other = Canaries(CPU, SMALL).blocks[2].view(torch.uint8)
    own = Canaries(CPU, SMALL).blocks[0].view(torch.uint8)
    flipped = own[100:101] ^ 8
    noise = torch.randint(0, 256, (999,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    written = {
        "churn": torch.full((512,), CHURN, dtype=torch.uint8),
        "canary": other[8192 : 8192 + 4096],
        "bit_flip": flipped,
        "other": noise,
    }
    found = {kind: harm_at(2, 0, 100, bytes_) for kind, bytes_ in written.items()}
    assert {kind: fault.kind for kind, fault in found.items() if fault} == {kind: kind for kind in written}
    shifted = harm_at(1, 0, 4096, own[4:4096])
    assert shifted is not None and shifted.kind == "canary"


def test_a_block_that_was_never_written_is_found_before_the_first_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    class LostStores(Canaries):
        def __init__(self, device: torch.device, settings: CanarySettings) -> None:
            super().__init__(device, settings)
            self.blocks[1][700:].zero_()

    monkeypatch.setattr(canaries, "Canaries", LostStores)
    fault = watch(CPU, SMALL, on_cycle=lambda cycle, _: pytest.fail("no cycle should have run"))
    assert fault is not None
    assert (fault.cycle, fault.canary, fault.kind, fault.first_offset) == (0, 1, "zeros", 2800)


def test_memory_that_comes_and_goes_stays_within_its_bound_and_varies() -> None:
    churning = Canaries(CPU, CanarySettings(canaries=1, canary_bytes=4096, churn_bytes=3 << 20))
    levels = set()
    for _ in range(50):
        churning.churn()
        assert 0 <= churning.churned_bytes <= 3 << 20
        levels.add(churning.churned_bytes)
    assert len(levels) > 25
    assert max(levels) > 1 << 20


def test_a_full_device_ends_a_cycle_and_not_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.full, []

    def full(*arguments: object, **named: object) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) % 3 == 0:
            raise torch.OutOfMemoryError("no memory")
        return real(*arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "full", full)
    assert watch(CPU, SMALL) is None
    assert len(calls) > 6


@pytest.mark.parametrize("wrong", [{"canaries": 0}, {"cycles": 0}, {"canary_bytes": 6}, {"churn_bytes": 1}])
def test_wrong_sizes_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        CanarySettings(**wrong)


@pytest.mark.gpu
def test_canaries_on_the_device_hold_and_a_zeroed_segment_is_found() -> None:
    device = torch.device("cuda")
    settings = CanarySettings.for_device(device, cycles=4, share=0.5)

    def harm(cycle: int, watched: Canaries) -> None:
        if cycle == 3:
            watched.blocks[2][1024:200_000] = 0

    assert watch(device, settings) is None
    fault = watch(device, settings, on_cycle=harm)
    assert fault is not None
    assert (fault.cycle, fault.canary, fault.kind, fault.first_offset) == (3, 2, "zeros", 4096)
