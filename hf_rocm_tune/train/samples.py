"""``--sample_every``: what the model answers to the user's prompts while it trains, for the log and the report page.

The first process answers, greedily, so that no random number is drawn: the model trains as it would without samples.
Prompts are transferred by the mover, as batches are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

if TYPE_CHECKING:
    from hf_rocm_tune.transfer import Mover

_MOST_TOKENS = 64


class SampledAnswers(TrainerCallback):
    """Answers the prompts every so many steps, and at the end; the answers are rows of the log."""

    def __init__(self, every: int, prompts: Sequence[str], mover: Mover, say: Callable[[str], None]) -> None:
        self._every, self._prompts, self._mover, self._say = every, tuple(prompts), mover, say

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if not state.is_world_process_zero or (state.global_step % self._every and state.global_step < state.max_steps):
            return
        model, tokenizer = more["model"], more["processing_class"]
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                answers = [
                    self._answer(model, getattr(tokenizer, "tokenizer", tokenizer), one) for one in self._prompts
                ]
        except torch.OutOfMemoryError:
            self._say(f"step {state.global_step}: no memory for samples; lower their number or --max_length")
            return
        finally:
            model.train(training)
        rows = [{"prompt": prompt, "text": text} for prompt, text in zip(self._prompts, answers, strict=True)]
        state.log_history.append({"step": state.global_step, "epoch": state.epoch, "samples": rows})
        for row in rows:
            self._say(f"step {state.global_step}, {row['prompt']!r}: {' '.join(row['text'].split()) or '(nothing)'}")

    def _answer(self, model: Any, tokenizer: Any, prompt: str) -> str:
        how: dict[str, Any] = {"return_tensors": "pt", "return_dict": True}
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **how)
        else:
            given = tokenizer(prompt, return_tensors="pt")
        inputs = self._mover.begin({name: given[name] for name in ("input_ids", "attention_mask")})
        self._mover.settle(inputs)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=_MOST_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        made = model.generate(**inputs, generation_config=config)
        return str(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
