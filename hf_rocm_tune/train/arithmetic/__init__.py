"""Checks of the products with frozen weights while a model trains, and what is done when one is wrong.

Read in this order:

    bounds      the check, and how far a right product may be from its checksum
    products    the layers that can be checked, and the residuals of one call
    checksums   frozen weights on the host: their checksums, and rows to compare with
    experts     products that a layer's hook does not see: mixtures, sharded weights
    attention   rows of attention, computed again
    verdict     products above their bound: on the host in float64, with another library, and the step's verdict
    checks      all of it in a training, as the trainer calls it
    rounding    how far rounding can move what a whole layer computes
    layer_copy  a layer on the host in float32
    layers      layers computed again on the host at a run's start

Residuals stay on the device until the step's loss and gradient norm are read, before the optimizer: no further wait.
Not found: errors below the bound, such as one low mantissa bit, and a product in a step in which its layer is not
checked. `train.replay` computes whole micro-batches twice, for what is no product with a frozen weight.
"""

from hf_rocm_tune.train.arithmetic.bounds import SHARE, share_of_step
from hf_rocm_tune.train.arithmetic.checks import FIRST_STEPS, ArithmeticChecks, Mode
from hf_rocm_tune.train.arithmetic.verdict import StepVerdict

__all__ = ["FIRST_STEPS", "SHARE", "ArithmeticChecks", "Mode", "StepVerdict", "share_of_step"]
