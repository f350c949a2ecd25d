"""The planner: what a training job takes of a card, by the model's configuration, and the fastest way that fits.

Reading order: `request` (the question), `sample` and `recorder` (one step of the real architecture on the meta device),
`estimate` (from recorded steps to a card's memory), `fit` (every case, the choice, one model over several cards),
`candidates` (what ``--auto_fit`` tries), and `command`. Only `sample` and `recorder` import torch.
"""

from hf_rocm_tune.plan.estimate import CONTEXT_BYTES, GIB, CardMemory, Estimate
from hf_rocm_tune.plan.fit import plan_for, split_plan
from hf_rocm_tune.plan.request import PUBLIC_MODELS, PlanRequest, card_memory, config_of, from_training, load_config
from hf_rocm_tune.plan.request import public_model as public_model

__all__ = ["CONTEXT_BYTES", "GIB", "PUBLIC_MODELS", "CardMemory", "Estimate", "PlanRequest", "card_memory"]
__all__ += ["config_of", "from_training", "load_config", "plan_for", "public_model", "split_plan"]
