"""A base with its adapter, or a whole model, loaded and verified to answer prompts.

Weights, adapter and prompts are transferred by the mover, as in training. Sampling is upstream's (`GenerationConfig`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.filesize import decimal as size
from transformers import GenerationConfig, TextStreamer, set_seed

from hf_rocm_tune.errors import FOREIGN_ERRORS, UsageError, first_line, shortage_advice
from hf_rocm_tune.models.factory import ModelSource, attest_files, check_source, load_model, load_tokenizer
from hf_rocm_tune.models.placement import Coverage, coverage, place
from hf_rocm_tune.publish.vocabulary import end_tokens
from hf_rocm_tune.survive.saved_adapter import WEIGHTS_FILE, Adapter, attach, base_of, find_adapter, read_adapter
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
"""A conversation: ``role`` and ``content`` of each message."""
Prompt = str | Messages


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to load, and how to answer; the fields are named like the flags. None: as the model says."""

    model: str
    base: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    load_in_4bit: bool = False
    trust_remote_code: bool = False
    compare: bool = False
    max_new_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    system: str | None = None
    raw: bool = False
    image: Sequence[str] = ()  # files or addresses of pictures, before the text of each prompt


@dataclass(frozen=True)
class Loaded:
    """A model that is ready."""

    settings: Settings
    model: Any  # in evaluation mode, a `PeftModel` where there is an adapter
    tokenizer: PreTrainedTokenizerBase  # the adapter's where it has one, else the base's
    mover: Mover  # moves inputs to the device
    base: str  # name of the model below the adapter, or of the model
    covered: Coverage
    processor: Any = None  # of a model that reads pictures, which has the tokenizer

    def place(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move host tensors to the device, verified."""
        placed: dict[str, Tensor] = self.mover.begin(inputs)
        self.mover.wait_verified(placed)
        return placed


@contextmanager
def loaded_model(settings: Settings, say: Callable[[str], None]) -> Iterator[Loaded]:
    """Load, report what was verified, and close the mover at the end."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    adapter = None
    directory = find_adapter(settings.model, settings.revision)
    if directory is not None:
        adapter = read_adapter(settings.model, directory)
    elif settings.base or settings.compare:
        flag = f"--base {settings.base}" if settings.base else "--compare"
        raise UsageError(f"{flag}: {settings.model} is a whole model, not an adapter: leave it out")
    source = _source(settings, adapter)
    try:
        scores = "ForSequenceClassification" in str(check_source(source, device).architectures)
    except UsageError as error:
        hint = "; --base names another base of the adapter" if adapter else ""
        raise UsageError(f"{error}{hint}") from error
    if scores or (adapter is not None and adapter.is_reward):
        raise UsageError(
            f"{settings.model} is a reward model, or another that classifies: it gives scores and no text; the code in "
            "its README.md scores a text"
        )
    with Mover(device, settings=TransferSettings(), faults=FaultSpec.from_environment()) as mover:
        faults = mover.fault_injection()
        if faults is not None:
            say(f"faults are injected on request: {faults}")
        model: Any
        model, seconds = load_model(source, mover)
        if not model.can_generate():
            raise UsageError(f"{source.name} is a {type(model).__name__}, which generates no text: give another model")
        model.generation_config = _for_one_answer(model.generation_config)
        records = attest_files(source, mover)  # of the base: an adapter says by itself what it is
        if adapter is not None:
            say(adapter.described)
            model = attach(model, adapter, _placer(mover, model.dtype, quantised=settings.load_in_4bit))
            place(model, mover)
            if adapter.trained_in_bits == 4 and not settings.load_in_4bit:
                say("it was trained on 4-bit weights and the base is loaded unquantised; --load_in_4bit quantises it")
        model.eval()
        covered = coverage(model, mover)
        unverified = ""
        if covered.unverified:
            unverified = f" (not: {', '.join(row['tensor'] for row in covered.unverified[:3])})"
        say(
            f"{source.name}: {size(covered.device_bytes)} loaded in {seconds:.1f} s; {covered.share} of the "
            f"bytes on the device verified{unverified}; weight files attested "
            f"{records.attested}, not attested {len(records.unknown)}"
        )
        tokenizer, processor = _tokenizer(source, adapter)
        yield Loaded(settings, model, tokenizer, mover, source.name, covered, processor)
        for stage, sent in mover.report.to_dict().items():
            if isinstance(sent, dict) and sent.get("mismatches"):
                say(f"{stage}: {sent['mismatches']} arrived wrong, {sent.get('recovered', 0)} of them were recovered")


def _source(settings: Settings, adapter: Adapter | None) -> ModelSource:
    name, revision = settings.model, settings.revision
    if adapter:
        base = base_of(adapter, settings.base)
        name, revision = base.name, base.revision
    dtype = settings.dtype
    quantization = None
    if settings.load_in_4bit:
        from transformers import BitsAndBytesConfig

        if dtype == "auto":
            dtype = "bfloat16"  # as the QLoRA runs of this package
        known = adapter.settings if adapter else {}
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_type=known.get("bnb_4bit_quant_type") or "nf4",
            bnb_4bit_use_double_quant=known.get("use_bnb_nested_quant", True),
        )
    return ModelSource(
        name=name,
        revision=revision or "main",
        trust_remote_code=settings.trust_remote_code,
        init={"dtype": dtype},
        quantization=quantization,
    )


def _placer(mover: Mover, dtype: torch.dtype, *, quantised: bool) -> Callable[[Tensor, str], Tensor]:
    """Moves an adapter's tensors to the device, in float32 at least, as PEFT; beside quantised weights as they are."""
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    prefixes = (*PEFT_TYPE_TO_PREFIX_MAPPING.values(), "trainable_tokens")

    def to_device(tensor: Tensor, name: str) -> Tensor:
        cast = None
        if tensor.is_floating_point():
            whole = not any(prefix in name for prefix in prefixes)
            if whole:
                cast = dtype
            elif quantised:
                cast = tensor.dtype
            else:
                cast = torch.promote_types(tensor.dtype, torch.float32)
        return mover.move(tensor, name=name, stage="adapter", source=WEIGHTS_FILE, dtype=cast)

    return to_device


def _tokenizer(source: ModelSource, adapter: Adapter | None) -> tuple[PreTrainedTokenizerBase, Any]:
    """The tokenizer, and the processor of a model that reads pictures (None: of text)."""
    if adapter is not None and adapter.has_tokenizer:
        source = ModelSource(name=str(adapter.directory), trust_remote_code=source.trust_remote_code)
    loaded: Any = load_tokenizer(source)
    tokenizer: PreTrainedTokenizerBase = getattr(loaded, "tokenizer", loaded)
    processor = None if tokenizer is loaded else loaded
    if processor is not None and not tokenizer.chat_template:
        tokenizer.chat_template = processor.chat_template
    return tokenizer, processor


# ---- answers --------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """The answer of a model."""

    text: str  # without special tokens
    tokens: int  # generated, the end token included
    complete: bool  # the model ended it; False: it reached a limit


def render(loaded: Loaded, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, with the generation prompt of the assistant where there is a chat template."""
    from jinja2 import TemplateError

    tokenizer: Any = loaded.tokenizer
    system = loaded.settings.system
    raw = loaded.settings.raw
    plain = raw or not tokenizer.chat_template
    if plain and system:
        why = "--raw leaves it out" if raw else "there is none"
        raise UsageError(f"--system needs a chat template, and {why}")
    if plain and not isinstance(prompt, str):
        raise UsageError(
            f"the prompt is a conversation, but the tokenizer of {loaded.settings.model} has no chat template"
        )
    try:
        if plain:
            ids = tokenizer(prompt)["input_ids"]
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            if loaded.processor is not None:
                messages = _in_parts(messages)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"the prompt cannot be rendered: {str(error).splitlines()[0]}") from error
    if not ids:
        raise UsageError("the prompt is empty: give some text")
    return [int(token) for token in ids]


def pictured(prompt: Prompt) -> bool:
    """Whether a conversation has pictures."""
    for message in prompt:
        content = message["content"] if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        for part in content:
            if isinstance(part, dict) and part.get("type") != "text":
                return True
    return False


def open_picture(loaded: Loaded, source: str) -> Any:
    """A picture that the model can be shown.

    UsageError: the model reads no pictures, or this one cannot be used.
    """
    from hf_rocm_tune.data.pictures import PictureRows

    if loaded.processor is None:
        raise UsageError(
            f"{source} cannot be shown to {loaded.settings.model}, a model of text: leave it out, or give an "
            "image-text model"
        )
    return PictureRows(as_rgb=True, folder_flag=None).opened(source)


def render_pictures(loaded: Loaded, prompt: Prompt) -> dict[str, Tensor]:
    """What a model is given of a prompt with pictures: host tensors of one row, as its processor makes them.

    Those of a text are the files of ``--image``, before it; a conversation has them in the parts of its messages, as
    ``{"type": "image", "image": "FILE"}``.

    UsageError: the model reads no pictures, or a picture cannot be used.
    """
    from hf_rocm_tune.data.pictures import PictureRows
    from hf_rocm_tune.data.trl_calls import as_trl_calls, with_flat_pictures

    processor = loaded.processor
    settings = loaded.settings
    images = [open_picture(loaded, source) for source in settings.image]
    raw = settings.raw or not getattr(processor, "chat_template", None)
    text = prompt if isinstance(prompt, str) else ""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]}]
    elif processor is None:
        raise UsageError(f"a prompt has pictures, and {settings.model} is a model of text: give an image-text model")
    elif images:
        raise UsageError("--image belongs to prompts of text: a conversation has its pictures in its own messages")
    elif raw:
        raise UsageError(f"the prompt is a conversation, but the processor of {settings.model} has no chat template")
    row = PictureRows(as_rgb=True, folder_flag=None).example({"images": images, "messages": prompt})
    if not raw:
        messages = _in_parts(row["messages"])
        if settings.system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": settings.system}]})
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    base = loaded.model
    if hasattr(base, "peft_config"):
        base = base.get_base_model()
    try:
        calls = with_flat_pictures(as_trl_calls(processor, type(base)))  # as in training
        made = calls(images=[row["images"]], text=[text], return_tensors="pt", add_special_tokens=False)
    except (*FOREIGN_ERRORS, StopIteration) as error:
        raise UsageError(f"the processor of {loaded.base} refuses the pictures: {first_line(error)}") from error
    return {name: value for name, value in made.items() if torch.is_tensor(value)}


def _in_parts(messages: Messages) -> Messages:
    """Messages whose texts are parts, as the templates of image-text models read them and as TRL trains them."""
    in_parts = []
    for message in messages:
        if isinstance(message["content"], str):
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        in_parts.append(message)
    return in_parts


def answer(
    loaded: Loaded,
    ids: Sequence[int],
    write: Callable[[str], None] = lambda _: None,
    *,
    seen: dict[str, Tensor] | None = None,
) -> Answer:
    """Generate from token ids. KeyboardInterrupt is raised; the text written so far stays.

    ``seen``: of a prompt with pictures, what `render_pictures` made.
    """
    config = _config(loaded, len(ids))
    tokens = torch.tensor([list(ids)])
    inputs = loaded.place(seen or {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    stream = _Stream(loaded.tokenizer, write)
    set_seed(loaded.settings.seed)
    advice = "shorten the prompt, lower --max_new_tokens, or add --load_in_4bit"
    with shortage_advice(advice), torch.inference_mode():
        try:
            made = loaded.model.generate(
                **inputs, generation_config=config, streamer=stream, tokenizer=loaded.tokenizer
            )
        except FOREIGN_ERRORS as error:
            *_, (frame, _) = walk_tb(error.__traceback__)
            if not frame.f_globals.get("__name__", "").startswith("transformers.generation"):
                raise
            raise UsageError(
                f"the generation_config.json of {loaded.base} cannot be used: {first_line(error)}; correct it"
            ) from error
    first = len(ids)
    if loaded.model.config.is_encoder_decoder:
        first = 1  # its decoder begins with a token of its own, and does not repeat the prompt
    new = made[0, first:].tolist()
    complete = bool(new) and new[-1] in (config.eos_token_id or [])
    return Answer("".join(stream.pieces), len(new), complete=complete)


def _config(loaded: Loaded, prompt_tokens: int) -> GenerationConfig:
    settings = loaded.settings
    length = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    before = 1 if loaded.model.config.is_encoder_decoder else prompt_tokens  # in the context of the answer
    room = min(settings.max_new_tokens, length - before) if length else settings.max_new_tokens
    if room <= 0:
        raise UsageError(f"the prompt has {prompt_tokens} tokens, and {settings.model} takes {length}: shorten it")
    config: GenerationConfig = deepcopy(loaded.model.generation_config)
    config.max_new_tokens = room
    given = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
    given = {name: value for name, value in given.items() if value is not None}
    if settings.temperature == 0:  # the likeliest token each time
        config.do_sample = False
        config.temperature = config.top_p = config.top_k = config.min_p = None
    elif given:
        config.update(**given, do_sample=True)
    # An adapter is trained with the end of its own tokenizer and chat template, which its base may not know.
    config.eos_token_id = end_tokens(config.eos_token_id, loaded.tokenizer) or None
    config.pad_token_id = 0  # there is one row
    return config


_KEPT = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "stop_strings", "min_new_tokens"),
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("exponential_decay_length_penalty", "renormalize_logits", "remove_invalid_values"),
    *("bos_token_id", "eos_token_id", "decoder_start_token_id"),
)


def _for_one_answer(given: GenerationConfig) -> GenerationConfig:
    """What a model says about the choice of tokens; not about beams, several answers and other models, which cannot be
    streamed."""
    kept = {name: getattr(given, name, None) for name in _KEPT}
    return GenerationConfig(**{name: value for name, value in kept.items() if value is not None})


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
