"""Loading a model, verified, for generation and evaluation; and the answer to one prompt.

The model is a base with its adapter, a merged model, or one from the Hub. Weights, adapter and prompts are transferred
by the mover, as in training. Sampling is upstream's (`GenerationConfig`), by default with the model's generation
settings. The same seed gives the same answer on the same machine; in a comparison, base and adapter use the same random
numbers.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TextStreamer, set_seed

from hf_rocm_tune.errors import UsageError, shortage_advice
from hf_rocm_tune.models.factory import ModelSource, attest_files, check_source, load_model, load_tokenizer
from hf_rocm_tune.models.loading import cast_verified
from hf_rocm_tune.models.placement import coverage, place
from hf_rocm_tune.publish import quiet_unless_terminal
from hf_rocm_tune.publish.adapter import WEIGHTS_FILE, Adapter, attach, base_of, find_adapter, open_adapter
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
"""A conversation: ``role`` and ``content`` of each message."""
Prompt = str | Messages


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What to load, and how; the fields are named like the flags."""

    model: str
    base: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    load_in_4bit: bool = False
    attn_implementation: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling; the fields are named like the flags. None: by the model's generation settings."""

    max_new_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model that is ready."""

    name: str  # as the user gave it
    model: Any  # in evaluation mode, a `PeftModel` where there is an adapter
    tokenizer: PreTrainedTokenizerBase  # the adapter's where it has one, else the base's
    mover: Mover  # moves inputs to the device
    adapter: Adapter | None  # None for a whole model
    base: str  # name of the model below the adapter, or of the model
    verified: dict[str, Any]  # coverage and attested files, for a report

    def without_adapter(self) -> AbstractContextManager[Any]:
        """Within the block the base answers alone."""
        disabled: AbstractContextManager[Any] = self.model.disable_adapter() if self.adapter else nullcontext()
        return disabled

    def place(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move host tensors to the device, verified."""
        placed: dict[str, Tensor] = self.mover.begin(inputs)
        self.mover.settle(placed)
        return placed


@contextmanager
def loaded_model(settings: LoadSettings, say: Callable[[str], None], *, compare: bool = False) -> Iterator[Loaded]:
    """Load, report what was verified, and close the mover at the end.

    Raises:
        UsageError: a file is missing or damaged, or adapter and base do not fit.
        CorruptionError: a tensor could not be transferred correctly.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    has_adapter = find_adapter(settings.model, settings.revision) is not None
    if settings.base and not has_adapter:
        raise UsageError(f"--base {settings.base}: {settings.model} is not an adapter, so it has no base: leave it out")
    adapter = open_adapter(settings.model, settings.revision) if has_adapter else None
    if adapter is not None and adapter.is_reward:
        raise _gives_scores(adapter.name, "an adapter of a reward model")
    source = _source(settings, adapter)
    if any("ForSequenceClassification" in str(name) for name in check_source(source, device).architectures or ()):
        raise _gives_scores(source.name, "a reward model, or another that classifies")
    if compare and adapter is None:
        raise UsageError(f"--compare needs an adapter, and {settings.model} is a whole model")
    with Mover(device, settings=TransferSettings(), faults=FaultSpec.from_environment()) as mover:
        if (faults := mover.fault_injection()) is not None:
            say(f"faults are injected on request: {faults}")
        model: Any
        with quiet_unless_terminal():
            model, seconds = load_model(source, mover)
        if not model.can_generate():
            raise UsageError(
                f"{source.name} is a {type(model).__name__}, which generates no text: give a language model"
            )
        if adapter is not None:
            say(adapter.described)
            model = attach(model, adapter, _placer(mover, model.dtype, quantised=settings.load_in_4bit))
            place(model, mover)
            if adapter.trained_in_bits == 4 and not settings.load_in_4bit:
                say("it was trained on 4-bit weights and the base is loaded unquantised; --load_in_4bit quantises it")
        model.eval()
        verified = _verified(model, mover, source)
        say(_line(source.name, verified, seconds))
        yield Loaded(
            name=settings.model,
            model=model,
            tokenizer=_tokenizer(source, adapter),
            mover=mover,
            adapter=adapter,
            base=source.name,
            verified=verified,
        )
        sent = mover.report.to_dict()["batches"]
        if sent["mismatches"]:
            say(f"inputs: {sent['mismatches']} arrived wrong, {sent['recovered']} of them were recovered")


def _gives_scores(name: str, what: str) -> UsageError:
    return UsageError(f"{name} is {what}: it gives scores and no text; the code in its README.md scores a text")


def _source(settings: LoadSettings, adapter: Adapter | None) -> ModelSource:
    base = base_of(adapter, settings.base) if adapter else None
    dtype, quantization = settings.dtype, None
    if settings.load_in_4bit:
        from transformers import BitsAndBytesConfig

        dtype = "bfloat16" if dtype == "auto" else dtype  # as the QLoRA runs of this package
        known = adapter.settings if adapter else {}  # as the adapter's run quantised, else as a run does by default
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_type=known.get("bnb_4bit_quant_type") or "nf4",
            bnb_4bit_use_double_quant=known.get("use_bnb_nested_quant", True),
        )
    init: dict[str, Any] = {"dtype": dtype}
    if settings.attn_implementation:
        init["attn_implementation"] = settings.attn_implementation
    return ModelSource(
        name=base.name if base else settings.model,
        revision=(base.revision if base else settings.revision) or "main",
        trust_remote_code=settings.trust_remote_code,
        init=init,
        quantization=quantization,
    )


def _placer(mover: Mover, dtype: torch.dtype, *, quantised: bool) -> Callable[[Tensor, str], Tensor]:
    """Moves an adapter's tensors to the device; whole modules get the dtype of the model.

    Beside quantised weights an adapter keeps the dtype of its file, in which it was trained. Beside others it computes
    in float32 at least, as PEFT does by default.
    """
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    prefixes = (*PEFT_TYPE_TO_PREFIX_MAPPING.values(), "trainable_tokens")

    def to_device(tensor: Tensor, name: str) -> Tensor:
        moved = mover.move(tensor, name=name, stage="adapter", source=WEIGHTS_FILE)
        whole = not any(prefix in name for prefix in prefixes)
        wanted = dtype if whole else moved.dtype if quantised else torch.promote_types(moved.dtype, torch.float32)
        if not moved.is_floating_point() or moved.dtype == wanted:
            return moved
        return cast_verified(moved, tensor, wanted, name=name, mover=mover)

    return to_device


def _tokenizer(source: ModelSource, adapter: Adapter | None) -> PreTrainedTokenizerBase:
    own = adapter is not None and adapter.has_tokenizer
    wanted = ModelSource(
        name=str(adapter.directory) if adapter is not None and own else source.name,
        revision="main" if own else source.revision,
        trust_remote_code=source.trust_remote_code,
    )
    loaded: Any = load_tokenizer(wanted)
    tokenizer: PreTrainedTokenizerBase = getattr(loaded, "tokenizer", loaded)  # of a processor for several modalities
    return tokenizer


def _verified(model: Any, mover: Mover, source: ModelSource) -> dict[str, Any]:
    records = attest_files(source, mover)
    found = coverage(model, mover)
    counted = mover.report.to_dict()
    counters = ("tensors", "bytes", "mismatches", "recovered")
    return {
        **{name: int(counted["weights"][name] + counted["adapter"][name]) for name in counters},
        "verified_bytes": found.verified_bytes,
        "device_bytes": found.device_bytes,
        "unverified": found.unverified,
        "files_attested": records.attested,
        "files_not_attested": list(records.unknown),
    }


def _line(name: str, verified: dict[str, Any], seconds: float) -> str:
    share = 100 * verified["verified_bytes"] / max(verified["device_bytes"], 1)
    wrong = verified["mismatches"]
    trouble = f" ({wrong} arrived wrong, {verified['recovered']} of them were recovered)" if wrong else ""
    missing = ", ".join(row["tensor"] for row in verified["unverified"][:3])
    return (
        f"{Path(name).name if os.path.isdir(name) else name}: {verified['tensors']:,} tensors, "
        f"{verified['bytes'] / 1e9:.3g} GB loaded in {seconds:.1f} s{trouble}; {share:.4g} % of the bytes on the "
        f"device verified{f' (not: {missing})' if missing else ''}; weight files attested "
        f"{verified['files_attested']}, not attested {len(verified['files_not_attested'])}"
    )


# ---- answers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a model."""

    text: str  # without special tokens
    tokens: int  # generated, the end token included
    complete: bool  # the model ended it; False: it reached a limit
    seconds: float  # from the prompt to the last token


def render(loaded: Loaded, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> list[int]:
    """Token ids of a prompt.

    Raises:
        UsageError: it is empty or no text, the chat template refuses it, or messages are given without a template.
    """
    tokenizer: Any = loaded.tokenizer
    if isinstance(prompt, str) and (raw or not tokenizer.chat_template):
        if system:
            raise UsageError(f"--system needs a chat template, and {'--raw leaves it out' if raw else 'there is none'}")
        _check_text(prompt)
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


def _check_text(prompt: Prompt) -> None:
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt has bytes that are not UTF-8, or half a character: correct it") from error


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Token ids of a conversation, with the generation prompt of the assistant.

    Raises:
        UsageError: it is no text, or the chat template refuses it (for example an unknown order of roles).
    """
    from jinja2 import TemplateError

    _check_text(messages)
    try:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"the chat template refuses this conversation: {str(error).splitlines()[0]}") from error
    return [int(token) for token in rendered["input_ids"]]


def answer(
    loaded: Loaded, ids: Sequence[int], sampling: Sampling, write: Callable[[str], None] = lambda _: None
) -> Answer:
    """Generate from token ids. KeyboardInterrupt is raised; the text written so far stays.

    Raises:
        UsageError: the prompt leaves no room in the model's context, or its generation settings are wrong.
        OutOfMemoryError: it does not fit on the device.
    """
    config = _config(loaded, sampling, len(ids))
    tokens = torch.tensor([list(ids)])
    inputs = loaded.place({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    stream = _Stream(loaded.tokenizer, write)
    set_seed(sampling.seed)
    begun = time.perf_counter()
    advice = "shorten the prompt, lower --max_new_tokens, or add --load_in_4bit"
    try:
        with shortage_advice(advice), torch.inference_mode():
            made = loaded.model.generate(**inputs, generation_config=config, streamer=stream)
    except ValueError as error:  # the flags have been checked
        if stream.pieces:  # of what takes the text
            raise
        raise UsageError(f"{loaded.base}: generation_config.json: {error}; correct it there") from error
    new = made[0, len(ids) :].tolist()
    return Answer(
        text="".join(stream.pieces),
        tokens=len(new),
        complete=bool(new) and new[-1] in (config.eos_token_id or []),
        seconds=time.perf_counter() - begun,
    )


def _config(loaded: Loaded, sampling: Sampling, prompt_tokens: int) -> GenerationConfig:
    length = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    room = min(sampling.max_new_tokens, length - prompt_tokens) if length else sampling.max_new_tokens
    if room <= 0:
        raise UsageError(f"the prompt has {prompt_tokens} tokens, and {loaded.name} takes {length}: shorten it")
    config: GenerationConfig = deepcopy(loaded.model.generation_config)
    config.max_length, config.max_new_tokens = None, room
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if (value := getattr(sampling, name)) is not None:
            setattr(config, name, value)
    if sampling.temperature == 0:
        config.do_sample = False
        config.temperature = config.top_p = config.top_k = config.min_p = None
    elif any(getattr(sampling, name) is not None for name in ("temperature", "top_p", "top_k", "min_p")):
        config.do_sample = True
        config.temperature = sampling.temperature or config.temperature
    # The model's end tokens and the tokenizer's: an adapter is trained with the end of its own chat template.
    known, own = config.eos_token_id, loaded.tokenizer.eos_token_id
    ends = [] if known is None else list(known) if isinstance(known, list) else [known]
    ends += [own] if own is not None and own not in ends else []
    config.eos_token_id = ends or None
    if config.pad_token_id is None:
        padding = loaded.tokenizer.pad_token_id
        config.pad_token_id = padding if padding is not None else (ends or [0])[0]
    return config


class _Stream(TextStreamer):
    """Upstream's streamer of whole words, which passes on and collects the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.pieces: list[str] = []
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        del stream_end
        if text:
            self.pieces.append(text)
            self._write(text)
