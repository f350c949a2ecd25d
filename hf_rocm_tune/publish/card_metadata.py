"""The metadata at the top of a model card, in the Hub's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData

from hf_rocm_tune.publish.history import last
from hf_rocm_tune.publish.history_values import text

if TYPE_CHECKING:
    from hf_rocm_tune.publish.card import CardFacts


def metadata(facts: CardFacts) -> str:
    """The YAML block, without the ``---`` around it. Names in ``facts`` are those of the Hub, or only to be shown.

    Licence and language are left out: they are the base model's and the data's, which this program does not know.
    """
    more: dict[str, Any] = {}
    if facts.base_model_id:
        more["base_model"] = facts.base_model_id
        more["base_model_relation"] = "adapter" if facts.is_adapter else "finetune"
    if facts.datasets:
        more["datasets"] = list(facts.datasets)
    if facts.trained.model_class.endswith("ForCausalLM"):
        more["pipeline_tag"] = "text-generation"
    results = _results(facts)
    if results:
        more |= {"model_name": facts.name, "eval_results": results}
    library = "peft" if facts.is_adapter else "transformers"
    return str(ModelCardData(library_name=library, tags=_tags(facts), **more).to_yaml())


def _tags(facts: CardFacts) -> list[str]:
    tags = ["transformers", "trl", "sft", "hf-rocm-tune", "generated_from_trainer"]
    if facts.is_adapter:
        tags.append("lora")
        if facts.base_model_id:
            tags.append(f"base_model:adapter:{facts.base_model_id}")
    return sorted(tags)


def _results(facts: CardFacts) -> list[EvalResult]:
    """The loss on the evaluation split, where the data is on the Hub and so has a name there."""
    loss = last(facts.rows, "eval_loss")
    if loss is None or len(facts.datasets) != 1:
        return []
    name = facts.datasets[0]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=name,
            dataset_split=text(facts.settings, "dataset_test_split") or None,
            dataset_config=text(facts.settings, "dataset_config") or None,
            metric_type="loss",
            metric_name="Loss",
            metric_value=round(loss, 6),
        )
    ]
