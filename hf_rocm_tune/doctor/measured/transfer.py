"""The measured checks of transfers and of memory."""

from __future__ import annotations

from hf_rocm_tune.doctor.measured.entry import Measured

# The kinds of transfer.raw_copies.FAULTS, which imports torch.
COPY_FAULTS = ("zeros", "zero_range", "flip", "stale", "drop", "unstable")

RANK_FAULTS = ("wrong", "zeros", "own", "absent")  # of ranks.trial_measures, likewise
_NEVER = 10**9  # seconds: JSON has no infinity

TRANSFER: tuple[Measured, ...] = (
    Measured(
        name="round_trip",
        group="transfers",
        about="bytes from the host to the card and back, by size, dtype and way of copying, cold and warm",
        module="round_trip",
        seconds=8,
        deadline_s=120,
        faults=COPY_FAULTS,
        options={"largest": 64 << 20, "repeats": 20},
    ),
    Measured(
        name="round_trip_long",
        group="transfers",
        about="the same with up to 256 MiB, and a hundred times the same tensor",
        module="round_trip",
        seconds=25,
        deadline_s=300,
        faults=COPY_FAULTS,
        options={"largest": 256 << 20, "repeats": 100},
        full=True,
    ),
    Measured(
        name="mmap_heap",
        group="transfers",
        about="a tensor in a mapped file to the card, against the same tensor on the heap",
        module="mapped_file",
        seconds=5,
        deadline_s=240,  # 8 MiB took 5 s where it stalls, and all ways of 40 MiB shall end
        faults=("slow", "zeros"),
    ),
    Measured(
        name="casts",
        group="transfers",
        about="changes of dtype on the card, and on the way to and from it, against the CPU's",
        module="casts",
        seconds=6,
        deadline_s=120,
        faults=COPY_FAULTS,
    ),
    Measured(
        name="bandwidth",
        group="transfers",
        about="speed of page-locked copies to the card and back, against what its link should give",
        module="bandwidth",
        seconds=4,
        deadline_s=120,
        faults=("slow",),
        options={"mib": 256},
    ),
    Measured(
        name="canaries",
        group="memory",
        about="memory that must not change while other memory is allocated and freed, for a few seconds",
        module="canaries",
        seconds=8,
        deadline_s=120,
        faults=("zeros", "flip"),
        options={"cycles": 40, "seconds": 4, "share": 0.9},
    ),
    Measured(
        name="canaries_long",
        group="memory",
        about="the same through 400 cycles",
        module="canaries",
        seconds=180,
        deadline_s=1800,
        faults=("zeros", "flip"),
        options={"cycles": 400, "seconds": _NEVER, "share": 0.9},
        full=True,
    ),
    Measured(
        name="pairs",
        group="pairs",
        about="copies between every ordered pair of cards, cold and warm, against copies through the host",
        module="pairs",
        seconds=12,
        deadline_s=45,
        faults=COPY_FAULTS,
        options={"largest": 64 << 20, "repeats": 10},
        every_card=False,
        own_child=False,
        needs_cards=2,
    ),
    Measured(
        name="pairs_long",
        group="pairs",
        about="the same with up to 1 GiB, and a hundred times the same copy",
        module="pairs",
        seconds=30,
        deadline_s=180,
        faults=COPY_FAULTS,
        options={"largest": 1 << 30, "repeats": 100},
        full=True,
        every_card=False,
        own_child=False,
        needs_cards=2,
    ),
    Measured(
        name="all_reduce",
        group="pairs",
        about="sums over all cards by value: RCCL, and where it fails what works instead",
        module="all_reduce",
        seconds=8,
        deadline_s=45,
        faults=RANK_FAULTS,
        options={"largest": 64 << 20, "repeats": 5},
        every_card=False,
        own_child=False,
        needs_cards=2,
    ),
    Measured(
        name="grad_sync",
        group="pairs",
        about="how a run on all cards would average gradients: its own preflight, with its deadlines",
        module="grad_sync",
        seconds=15,
        deadline_s=30,
        faults=RANK_FAULTS,
        every_card=False,
        own_child=False,
        needs_cards=2,
    ),
)
"""In the order in which they run."""
