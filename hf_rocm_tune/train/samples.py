"""``--sample_every``: what the model answers to the user's prompts while it trains, for the log and the report page.

The first process answers, greedily, so that no random number is drawn: the model trains as it would without samples.
Prompts and pixels are transferred by the mover, as batches are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from hf_rocm_tune.data.trl_calls import with_flat_pictures
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from hf_rocm_tune.transfer import Mover

_MOST_TOKENS = 64


def open_pictures(names: Sequence[str], processor: Any) -> list[Any]:
    """The pictures of ``--sample_images``.

    UsageError: one cannot be used, or the model reads no pictures.
    """
    if not names:
        return []
    from hf_rocm_tune.data.pictures import PictureRows  # not imported for text

    if getattr(processor, "image_processor", None) is None:
        raise UsageError("--sample_images: the model is one of text: leave them out, or give an image-text model")
    return [PictureRows(as_rgb=True, folder_flag=None).opened(name) for name in names]


class SampledAnswers(TrainerCallback):
    """Answers the prompts every so many steps, and at the end; the answers are rows of the log.

    ``images``: files of pictures, one for each prompt, or one for all; empty: prompts of text.
    """

    def __init__(
        self,
        every: int,
        prompts: Sequence[str],
        mover: Mover,
        say: Callable[[str], None],
        images: Sequence[str] = (),
    ) -> None:
        self._every, self._mover, self._say = every, mover, say
        shown: Sequence[str | None] = images or [None] * len(prompts)
        if len(images) == 1:
            shown = [*images] * len(prompts)
        self._asked = list(zip(prompts, shown, strict=True))

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if not state.is_world_process_zero or (state.global_step % self._every and state.global_step < state.max_steps):
            return
        model, processor = more["model"], more["processing_class"]
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                answers = [self._answer(model, processor, prompt, image) for prompt, image in self._asked]
        except torch.OutOfMemoryError:
            self._say(f"step {state.global_step}: no memory for samples; lower their number or --max_length")
            return
        finally:
            model.train(training)
        rows = []
        for (prompt, image), text in zip(self._asked, answers, strict=True):
            asked = prompt if image is None else f"{prompt} ({Path(image).name})"
            rows.append({"prompt": asked, "text": text})
        state.log_history.append({"step": state.global_step, "epoch": state.epoch, "samples": rows})
        for row in rows:
            self._say(f"step {state.global_step}, {row['prompt']!r}: {' '.join(row['text'].split()) or '(nothing)'}")

    def _answer(self, model: Any, processor: Any, prompt: str, image: str | None) -> str:
        tokenizer = getattr(processor, "tokenizer", processor)
        inputs = self._mover.begin(_inputs(processor, tokenizer, prompt, image))
        self._mover.wait_verified(inputs)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=_MOST_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        made = model.generate(**inputs, generation_config=config)
        return str(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def _inputs(processor: Any, tokenizer: Any, prompt: str, image: str | None) -> dict[str, Any]:
    """Host tensors of one row: ids and mask int64 of shape [1, tokens]; with a picture also its tensors."""
    template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    if processor is tokenizer or not template:
        if template:
            asked = [{"role": "user", "content": prompt}]
            how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            given = tokenizer.apply_chat_template(asked, **how)
        else:
            given = tokenizer(prompt, return_tensors="pt")
        return {name: given[name] for name in ("input_ids", "attention_mask")}
    pictures = [{"type": "image"}] if image is not None else []
    parts: list[dict[str, str]] = [*pictures, {"type": "text", "text": prompt}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if image is None:
        given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        return {name: given[name] for name in ("input_ids", "attention_mask")}
    images = [open_pictures([image], processor)]
    made = with_flat_pictures(processor)(images=images, text=[text], return_tensors="pt", add_special_tokens=False)
    return {name: value for name, value in made.items() if torch.is_tensor(value)}
