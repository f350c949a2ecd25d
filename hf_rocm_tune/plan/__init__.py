"""The planner: what a training job takes of a card, by the model's configuration, and the fastest settings that fit.

Reading order: `request` (the question), `sample` and `recorder` (one step of the real architecture on the meta device),
`recordings` (of every case), `estimate` (from recorded steps to a card's memory), `grid` (every case, estimated), `fit`
(the choice), `strategies` (several cards, and advice), and `command`. Only `sample` and `recorder` import torch.
"""

from hf_rocm_tune.plan.estimate import CONTEXT_BYTES, GIB, CardMemory, Estimate, describe, little_room, missing
from hf_rocm_tune.plan.fit import Plan, plan_for
from hf_rocm_tune.plan.request import (
    PUBLIC_MODELS,
    TRAINERS,
    PlanRequest,
    card_memory,
    config_of,
    from_training,
    public_model,
)
from hf_rocm_tune.plan.strategies import advice, even_counts, split_plan

__all__ = ["CONTEXT_BYTES", "GIB", "PUBLIC_MODELS", "TRAINERS", "CardMemory", "Estimate", "Plan", "PlanRequest"]
__all__ += ["advice", "card_memory", "config_of", "describe", "even_counts", "from_training", "little_room", "missing"]
__all__ += ["plan_for", "public_model", "split_plan"]
