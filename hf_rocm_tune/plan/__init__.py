"""The planner: what a training job takes of a card, by the model's configuration, and the fastest way that fits.

Reading order: `request` (the question), `sample` and `recorder` (one step of the real architecture on the meta device),
`estimate` (from recorded steps to a card's memory), `fit` (every case, and the choice), `split` (one model over several
cards), `candidates` (what ``--auto_fit`` tries), `text` and `command`. Only `sample` and `recorder` import torch.
"""

from hf_rocm_tune.plan.estimate import CONTEXT_BYTES, GIB, CardMemory, Case, Estimate, estimate
from hf_rocm_tune.plan.fit import Plan, largest_models, plan_for
from hf_rocm_tune.plan.public_models import PUBLIC_MODELS, public_model
from hf_rocm_tune.plan.request import PlanRequest, card_memory, config_of, from_training, load_config
from hf_rocm_tune.plan.split import SplitPlan, over_cards, split_plan

__all__ = [
    "CONTEXT_BYTES",
    "GIB",
    "PUBLIC_MODELS",
    "CardMemory",
    "Case",
    "Estimate",
    "Plan",
    "PlanRequest",
    "SplitPlan",
    "card_memory",
    "config_of",
    "estimate",
    "from_training",
    "largest_models",
    "load_config",
    "over_cards",
    "plan_for",
    "public_model",
    "split_plan",
]
