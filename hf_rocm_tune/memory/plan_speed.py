"""How long a step takes, as an estimate that ranks choices. It is not a measurement and no figure of a card.

    seconds = operations / matrix rate + bytes moved / bandwidth + launches * cost of a launch

Operations, bytes written and launches are counted in the recorded step, recomputation included; frozen weights are read
once in each direction and once more when activations are recomputed. The matrix rate, the share of the bandwidth and
the cost of a launch are assumptions: they decide how much a larger micro-batch gains, hardly whether recomputation
costs. Pure arithmetic: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_rocm_tune.memory.plan import CardMemory, Estimate

#: Assumed: half of the 103 TFLOPS that the data sheet gives a 7900 XT's matrix instructions in bfloat16.
MATRIX_RATE = 50e12
#: Assumed: share of the data sheet's bandwidth that a kernel reaches.
BANDWIDTH_SHARE = 0.8
#: An operation reads about twice what it writes.
MOVED_PER_WRITTEN = 3.0
#: Assumed: seconds a launch costs, Python's share included.
LAUNCH = 10e-6


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The estimate for one choice.

    Args:
        tokens_per_second: on all cards, padding counted as tokens.
        products, traffic, launches: shares of the time.
    """

    tokens_per_second: float
    products: float
    traffic: float
    launches: float

    def why(self) -> str:
        """The shares in words."""
        return (
            f"{100 * self.products:.0f} % matrix products, {100 * self.traffic:.0f} % memory traffic, "
            f"{100 * self.launches:.0f} % launches"
        )


def speed(estimate: Estimate, card: CardMemory) -> Speed:
    """How fast a choice is estimated to be."""
    case, work = estimate.case, estimate.work
    passes = 3 if case.checkpointing else 2
    moved = MOVED_PER_WRITTEN * work.written + passes * estimate.parts["weights"]
    products = work.flops / MATRIX_RATE
    traffic = moved / (BANDWIDTH_SHARE * card.bandwidth)
    launches = work.launches * LAUNCH
    whole = products + traffic + launches
    return Speed(
        tokens_per_second=case.cards * case.micro_batch * case.length / whole,
        products=products / whole,
        traffic=traffic / whole,
        launches=launches / whole,
    )
