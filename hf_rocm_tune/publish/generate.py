"""Text from a model: one prompt in, one answer out, streamed as it is made.

The prompt passes the mover like a training batch. Sampling is upstream's (`GenerationConfig`); what the user does not
set is as the model's own generation settings say. The same seed gives the same answer on the same machine, and base
and adapter draw the same random numbers when they are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import TextStreamer, set_seed

from hf_rocm_tune.errors import OutOfMemoryError, UsageError, device_shortage

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from hf_rocm_tune.publish.generate_model import Loaded
    from hf_rocm_tune.publish.generate_settings import Messages, Sampling


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model said.

    Attributes:
        text: without special tokens.
        tokens: how many were made, the end token included.
        complete: the model ended it itself; False when it ran into a limit.
        seconds: from the prompt to the last token.
    """

    text: str
    tokens: int
    complete: bool
    seconds: float


def render(loaded: Loaded, prompt: str | Messages, *, system: str | None = None, raw: bool = False) -> list[int]:
    """Token ids of a prompt.

    Args:
        loaded: whose tokenizer is used.
        prompt: text, or messages.
        system: a system message before it.
        raw: text goes in as it is, without the chat template.

    Raises:
        UsageError: it is empty, the chat template refuses it, or there is none for messages.
    """
    tokenizer: Any = loaded.tokenizer
    if isinstance(prompt, str) and (raw or not tokenizer.chat_template):
        if system:
            raise UsageError(f"--system needs a chat template, and {'--raw leaves it out' if raw else 'there is none'}")
        ids = [int(token) for token in tokenizer(prompt)["input_ids"]]
    else:
        if not tokenizer.chat_template:
            raise UsageError(f"the prompt is a conversation, but the tokenizer of {loaded.name} has no chat template")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        ids = apply_template(tokenizer, messages)
    if not ids:
        raise UsageError("the prompt is empty: give some text")
    return ids


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Token ids of a conversation, up to where the assistant begins to speak.

    Raises:
        UsageError: the chat template refuses it (an order of roles that it does not know, say).
    """
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"the chat template refuses this conversation: {str(error).splitlines()[0]}") from error
    return [int(token) for token in rendered["input_ids"]]


def answer(
    loaded: Loaded, ids: Sequence[int], sampling: Sampling, write: Callable[[str], None] = lambda _: None
) -> Answer:
    """Let the model go on from token ids.

    Args:
        loaded: the model.
        ids: of the prompt.
        sampling: how tokens are chosen.
        write: called with each piece of text as soon as it is complete.

    Raises:
        UsageError: the prompt leaves no room in the model's context.
        OutOfMemoryError: it does not fit on the device.
        KeyboardInterrupt: Ctrl-C; what was written until then stands.
    """
    config = _config(loaded, sampling, len(ids))
    tokens = torch.tensor([list(ids)])
    inputs = loaded.place({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    stream = _Stream(loaded.tokenizer, write)
    set_seed(sampling.seed)
    begun = time.perf_counter()
    try:
        with torch.inference_mode():
            made = loaded.model.generate(**inputs, generation_config=config, streamer=stream)
    except RuntimeError as error:
        if (said := device_shortage(error)) is None:
            raise
        raise OutOfMemoryError(f"{said}: shorten the prompt, lower --max_new_tokens, or add --load_in_4bit") from error
    new = made[0, len(ids) :].tolist()
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return Answer(
        text="".join(stream.pieces),
        tokens=len(new),
        complete=bool(new) and new[-1] in ends,
        seconds=time.perf_counter() - begun,
    )


def room_for(loaded: Loaded, prompt_tokens: int) -> int | None:
    """Tokens that are left in the context after a prompt; None where the configuration names no limit."""
    length = loaded.context_length
    return None if length is None else max(length - prompt_tokens, 0)


def _config(loaded: Loaded, sampling: Sampling, prompt_tokens: int) -> GenerationConfig:
    room = room_for(loaded, prompt_tokens)
    if room == 0:
        raise UsageError(
            f"the prompt has {prompt_tokens} tokens, and {loaded.name} takes {loaded.context_length}: shorten it"
        )
    config: GenerationConfig = deepcopy(loaded.model.generation_config)
    config.max_length = None
    config.max_new_tokens = sampling.max_new_tokens if room is None else min(sampling.max_new_tokens, room)
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if (value := getattr(sampling, name)) is not None:
            setattr(config, name, value)
    if sampling.temperature == 0:
        config.do_sample = False
        config.temperature = config.top_p = config.top_k = config.min_p = None
    elif any(getattr(sampling, name) is not None for name in ("temperature", "top_p", "top_k", "min_p")):
        config.do_sample = True
        config.temperature = sampling.temperature or config.temperature
    config.eos_token_id = _ends(config, loaded.tokenizer)
    if config.pad_token_id is None:
        own = loaded.tokenizer.pad_token_id
        config.pad_token_id = own if own is not None else (config.eos_token_id or [0])[0]
    return config


def _ends(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The model's end tokens and the tokenizer's: an adapter is trained with the end of its own chat template."""
    known = config.eos_token_id
    ends = [] if known is None else list(known) if isinstance(known, list) else [known]
    own = tokenizer.eos_token_id
    return [*ends, own] if own is not None and own not in ends else ends or None


class _Stream(TextStreamer):
    """Upstream's streamer, which gives out whole words and characters, writing to where we say and keeping the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.pieces: list[str] = []
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by upstream with each piece."""
        del stream_end
        if text:
            self.pieces.append(text)
            self._write(text)
