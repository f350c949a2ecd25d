"""Checks of what lies between the gradients and the new weights: clipping, learning rates and the optimizer's step.

Samples are copied on the device before and after each operation and read with the numbers of the step, so that nothing
waits. The host computes the operation's definition in float64; results must agree within the rounding of the dtypes
that are stored and computed in. In each step

- a run of at most `ELEMENTS` neighbours of at most `TENSORS` gradients before and after clipping, and the norm of all
  gradients by another kernel (a scalar product), where they are within `NORM_BYTES`, else every so many steps;
- as many elements of weights, gradients and state before and after the update: AdamW and Adam (Kingma and Ba,
  arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101), also bitsandbytes' with 32 bits, or with 8 (then one block
  of 256 elements of a tensor: its scale is the block's largest value), and SGD (Sutskever et al. 2013, as torch
  defines it);
- each group's learning rate, from the definition of the schedule, before it is used.

Clipping is judged before the update, the update with the numbers of the next step, or before a save.

Reading order: `checks` (what the trainer owns), `schedule`, `clipping`, `optimizers` (the definitions), `comparison`.
"""

from __future__ import annotations

from hf_rocm_tune.train.update.checks import UpdateChecks
from hf_rocm_tune.train.update.schedule import Schedule

__all__ = ["Schedule", "UpdateChecks"]
