"""Input of the planner: a job's settings, the card, a model's configuration or published shape. Imports no torch."""

from __future__ import annotations

import argparse
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hf_rocm_tune.errors import UsageError, checked
from hf_rocm_tune.machine.cards import CARDS, Card
from hf_rocm_tune.machine.survey import Gpu, Machine, survey
from hf_rocm_tune.models.streamed import FLAG, parse
from hf_rocm_tune.plan.estimate import GIB, OPTIMIZERS, RATES_OF, CardMemory, Rates

METHODS = ("lora", "qlora", "full")
TRAINERS = ("sft", "dpo", "kto")
DTYPES = ("bfloat16", "float16", "float32")
ATTENTIONS = ("sdpa", "eager")
PARTS_TRAINED = ("no", "lora", "whole")
ALL_LINEAR = "all-linear"
_OPTIMIZER = "adamw_torch_fused"
_LARGEST_BATCH = 1 << 16  # every divisor is a case
_MICRO_BATCH = "--batch_size --micro_batch --per_device_train_batch_size"
_EVAL_BATCH = "--eval_batch --per_device_eval_batch_size"
_EXPERTS = "--target_parameters --lora_target_parameters"
_WHOLE = "--modules_to_save --lora_modules_to_save"


def _flag(default: Any, names: str, meaning: str, *, least: int | None = None, **more: Any) -> Any:
    """A field that is a flag of ``hf-rocm-tune plan``; ``more``: for argparse."""
    if least is not None:
        more["type"] = checked(int, lambda value: value >= least, f"{least} or more")
    if default is False:
        more["action"] = "store_true"
    return field(default=default, metadata={"names": names.split(), "help": meaning, **more})


def _is_few(epochs: float) -> bool:
    return 0 < epochs < 1e6


def _on_or_off(word: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if word.lower() not in known:
        raise argparse.ArgumentTypeError(f"it must be true or false, got {word}")
    return known[word.lower()]


class EmbeddingsWrittenError(UsageError):
    """A model writes into its embeddings' output, which must not be where activations are recomputed."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request to the planner; invalid values are named in a UsageError."""

    model: str = _flag("", "--model --model_name_or_path", "Hub id or directory; only its configuration is read")
    revision: str = _flag("main", "--revision --model_revision", "branch, tag or commit of a Hub id")
    trust_remote_code: bool = _flag(False, "--trust_remote_code", "run the model's own configuration code")
    trainer: str = _flag("sft", "--trainer", "the verb to plan (sft)", choices=TRAINERS)
    methods: tuple[str, ...] = ("lora", "qlora")  # to choose from, of `METHODS`
    length: int = _flag(2048, "--max_length --max_seq_length --seq", "tokens of a row (2048, or the limit)", least=2)
    effective_batch: int = _flag(16, "--effective_batch", "sequences per step, over all cards (16)", least=1)
    micro_batch: int | None = _flag(
        None, _MICRO_BATCH, "sequences at a time on a card (default: the fastest that leaves room)", type=int
    )
    eval_batch: int | None = _flag(None, _EVAL_BATCH, "rows at a time in evaluation", least=1)
    evaluates: bool = True
    cards: int = _flag(1, "--cards", "number of cards; with several, all ways over them are compared (1)", least=1)
    rows: int = _flag(
        0, "--rows", "count hours for this many rows, of --max_length tokens each without --dataset (1000)", least=0
    )
    epochs: float = _flag(
        1.0,
        "--epochs --num_train_epochs",
        "passes over the rows, for the hours (1)",
        type=checked(float, _is_few, "above 0"),
    )
    checkpointing: bool | None = _flag(
        None,
        "--gradient_checkpointing --checkpointing --activation_checkpointing",
        "recompute activations, or not: false (default: the faster that fits)",
        type=_on_or_off,
        nargs="?",
        const=True,
        metavar="BOOL",
    )
    recompute: tuple[int, int] | None = None  # only this mix; see `estimate.Case`
    mixes: bool = True  # consider mixes of recomputation
    packing: bool = _flag(False, "--packing", "pack several short sequences into one")
    stream: int = _flag(0, FLAG, "layers whose weights live in host memory (off)", type=parse, metavar="auto|off|N")
    rank: int = _flag(16, "--lora_r --lora_rank --rank", "rank of the adapters (16)", least=1)
    dropout: float = _flag(0.0, "--lora_dropout --dropout", "dropout before the adapters (0)", type=float)
    targets: str | tuple[str, ...] = _flag(ALL_LINEAR, "--targets --lora_target_modules", "adapted modules", nargs="+")
    target_parameters: tuple[str, ...] = _flag((), _EXPERTS, "adapted experts: experts.down_proj ...", nargs="+")
    modules_to_save: tuple[str, ...] = _flag((), _WHOLE, "modules that are trained whole", nargs="+")
    dora: bool = _flag(False, "--dora --use_dora", "use DoRA instead of plain LoRA")
    one_pass_loss: bool = _flag(False, "--one_pass_loss", "compute the gradient of the loss in the forward pass")
    nested: bool = True  # constants of 4-bit weights are quantised too
    dtype: str | None = _flag(
        None, "--dtype", "dtype of the weights (bfloat16; --method full: float32)", choices=DTYPES
    )
    autocast: bool = True  # mixed precision in bfloat16
    optim: str = _flag(_OPTIMIZER, "--optim", f"optimizer ({_OPTIMIZER})", choices=tuple(OPTIMIZERS))
    attention: str = _flag(
        "sdpa", "--attention --attn_implementation", "implementation of attention (sdpa)", choices=ATTENTIONS
    )
    workers: int = _flag(0, "--workers --dataloader_num_workers", "data loader workers of each process (0)", least=0)
    train_vision_tower: str = _flag(
        "no", "--train_vision_tower", "train what reads pictures, with adapters or whole (no)", choices=PARTS_TRAINED
    )
    train_projector: str = _flag(
        "no", "--train_projector", "likewise what leads into the language model (no)", choices=PARTS_TRAINED
    )
    max_pixels: int | None = _flag(
        None, "--max_pixels", "make larger pictures of the rows smaller, to so many pixels", least=1
    )
    image_folder: str | None = _flag(None, "--image_folder", "where relative paths of pictures in the rows are")
    # tensors of the pictures of the largest row, or pair: name, shape (None: an entry for each token; -1 first: what
    # follows for each token), dtype, and the values of integers; empty: text only
    pictures: tuple[tuple[str, tuple[int, ...] | None, str, Any], ...] = ()
    placeholders: int = 0  # tokens of pictures in a sequence of that row
    platform: str = "hip"  # whose kernels count: ``hip``, ``cuda`` or ``cpu``
    triton: bool = True  # whether Triton's run there

    def __post_init__(self) -> None:
        faults = []
        for name, known in (("optim", OPTIMIZERS), ("dtype", DTYPES), ("trainer", TRAINERS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                faults.append(f"--{name} {value} is not known to the planner; it knows {', '.join(known)}")
        batch = self.effective_batch
        if batch > _LARGEST_BATCH:
            faults.append(f"--effective_batch must be {_LARGEST_BATCH} or less, got {batch}")
        if batch % self.cards:
            faults.append(f"--effective_batch {batch} cannot be divided evenly over {self.cards} cards")
        if self.micro_batch is not None and (self.micro_batch < 1 or self.per_card % self.micro_batch):
            faults.append(f"--batch_size {self.micro_batch} does not divide the {self.per_card} sequences of a card")
        if not 0 <= self.dropout < 1:
            faults.append(f"--dropout must be 0 or more and below 1, got {self.dropout}")
        if self.trainer != "sft" and (self.packing or self.one_pass_loss):
            faults.append(f"--packing and --one_pass_loss are for sft, not {self.trainer}")
        if self.trainer == "kto" and (self.micro_batch or self.per_card) < 2:
            faults.append("kto needs two or more sequences in a micro-batch: its KL estimate pairs them")
        of_adapters = self.stream or self.dora or self.modules_to_save or self.target_parameters
        if "full" in self.methods and of_adapters:
            flags = f"--dora, --target_parameters, --modules_to_save and {FLAG}"
            faults.append(f"{flags} are for adapters: leave them out with --method full")
        if self.stream and self.dora:
            faults.append(f"{FLAG} does not support --dora: leave one out")
        if faults:
            raise UsageError("; ".join(faults))

    @property
    def rows_a_unit(self) -> int:
        """Sequences of the tensors that belong to one row of the data."""
        return 2 if self.trainer == "dpo" else 1

    @property
    def per_card(self) -> int:
        """Sequences of an optimizer step on each card."""
        return self.effective_batch // max(self.cards, 1)

    def dtype_of(self, method: str) -> str:
        return self.dtype or ("float32" if method == "full" else "bfloat16")


def as_targets(words: Sequence[str]) -> str | tuple[str, ...]:
    """Names of modules; a single word that is no name, such as ``all-linear`` or a pattern, stands for itself."""
    if len(words) == 1 and not re.fullmatch(r"[\w.]+", words[0]):
        return words[0]
    return tuple(words)


#: Fields that a training job has with the same value, and its flag.
SAME = {
    "model": "model_name_or_path",
    "revision": "model_revision",
    "trust_remote_code": "trust_remote_code",
    "length": "max_length",
    "packing": "packing",
    "rank": "lora_r",
    "optim": "optim",
    "workers": "dataloader_num_workers",
    "nested": "use_bnb_nested_quant",
    "autocast": "bf16",
    "train_vision_tower": "train_vision_tower",
    "train_projector": "train_projector",
    "max_pixels": "max_pixels",
    "image_folder": "image_folder",
}


def from_training(
    settings: Mapping[str, Any], *, trainer: str = "sft", cards: int = 1, platform: str = "hip"
) -> PlanRequest:
    """The request of a training job, at its own effective batch, by the names of its flags."""
    from hf_rocm_tune.models.recompute import parse as parse_counts

    if settings.get("load_in_8bit"):
        raise UsageError("--load_in_8bit cannot be planned: choose the micro-batch yourself")
    if settings.get("max_length") is None:
        raise UsageError("the planner needs --max_length: without it the longest row sets the memory")
    if settings.get("label_smoothing_factor"):
        raise UsageError("--label_smoothing_factor builds all logits, which are not planned")
    per_card = int(settings["per_device_train_batch_size"]) * int(settings["gradient_accumulation_steps"])
    same = {name: settings[flag] for name, flag in SAME.items() if settings.get(flag) is not None}
    method = "full"
    if settings.get("use_peft"):
        method = "qlora" if settings.get("load_in_4bit") else "lora"
        same["dora"] = bool(settings.get("use_dora"))
        for name in ("target_parameters", "modules_to_save"):
            same[name] = tuple(settings.get(f"lora_{name}") or ())
    targets = settings.get("lora_target_modules") or ALL_LINEAR
    if isinstance(targets, str):
        targets = [targets]
    dropout = 0.0
    if not settings.get("disable_dropout"):  # TRL turns dropout off for preferences
        dropout = float(settings["lora_dropout"])
    dtype = "bfloat16"  # TRL's `auto` and None load the file's dtype, nearly always this one
    if settings.get("dtype") not in ("auto", None):
        dtype = str(settings["dtype"])
    mix: tuple[int, int] | None = None
    if settings.get("recompute_layers") is not None:
        mix = parse_counts(str(settings["recompute_layers"]))
    return PlanRequest(
        trainer=trainer,
        methods=(method,),
        effective_batch=cards * per_card,
        cards=cards,
        dropout=dropout,
        targets=as_targets(targets),
        dtype=dtype,
        attention="eager" if settings.get("attn_implementation") == "eager" else "sdpa",
        platform=platform,
        recompute=mix,
        mixes=not settings.get("torch_compile"),
        stream=parse(str(settings.get("stream_weights") or "off")),
        **same,
    )


# ---- the card ---------------------------------------------------------------------------------------------------

#: torch sees 19.92 to 19.94 GiB of a 7900 XT's 20 GiB; the share of other cards was not read.
_USABLE_SHARE = 19.9 / 20
_USUAL_BANDWIDTH = 800


def card_memory(
    *,
    name: str | None = None,
    vram_gib: float | None = None,
    desktop_gib: float | None = None,
    machine: Machine | None = None,
) -> CardMemory:
    """The memory to plan for: the named card, else one of that size, else the one in this machine, else a 7900 XT.

    ``desktop_gib``, held by other processes, is read from the kernel or assumed unless given.
    """
    if name is not None and vram_gib is not None:
        raise UsageError("--gpu and --vram exclude each other; keep one")
    installed = _largest_card(machine or survey())
    installed_gib = 0.0
    if installed is not None:
        installed_gib = (installed.sensors.vram_total_bytes or 0) / GIB
    row: Card | None = None  # of the card table
    size: float | None = None
    if vram_gib is not None:
        size = vram_gib
    elif name is not None:
        row = _named(name)
    elif installed is not None:
        row = installed.card
        size = installed_gib
    else:
        row = _named("rx7900xt")
    if row is not None and row.vram_gib:
        size = row.vram_gib
    if not size:
        unknown = row.name if row else name
        raise UsageError(f"the memory of {unknown} is not in the card table; give --vram in GiB")
    card = CardMemory(
        name=f"a card of {size:g} GiB",
        usable=int(size * _USABLE_SHARE * GIB),
        rates=Rates(known=False),  # of most cards no speed is published, and only choices are ranked
        bandwidth=1e9 * _USUAL_BANDWIDTH,
    )
    if row is not None:
        card = replace(card, name=row.name)
        if row.bandwidth_gb_s:
            card = replace(card, bandwidth=1e9 * row.bandwidth_gb_s)
        if row.bf16_tflops:
            rates = replace(RATES_OF.get(row.key, Rates()), products=1e12 * row.bf16_tflops)
            card = replace(card, rates=rates)
    if desktop_gib is not None:
        return replace(card, desktop=int(desktop_gib * GIB), desktop_source="given")
    if installed is not None and installed.sensors.vram_used_bytes is not None and abs(installed_gib - size) < 1:
        source = f"read from the card at {installed.address}"
        return replace(card, desktop=installed.sensors.vram_used_bytes, desktop_source=source)
    return card


def _largest_card(machine: Machine) -> Gpu | None:
    """The discrete card of this machine with the most memory."""
    cards = [gpu for gpu in machine.gpus if gpu.sensors.vram_total_bytes and not gpu.integrated]
    return max(cards, key=lambda gpu: gpu.sensors.vram_total_bytes or 0, default=None)


def _named(name: str) -> Card:
    def letters(text: str) -> str:  # without spaces, dashes and common words
        return re.sub(r"[^a-z0-9]|\b(amd|radeon|rx|pro|ai|instinct)\b|^rx", "", text.lower())

    for card in CARDS:
        if letters(name) in (letters(card.key), letters(card.name)):
            return card
    names = ", ".join(letters(card.key) for card in CARDS)
    raise UsageError(f"--gpu {name} is not in the card table; it has {names}. Or give --vram in GiB")


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block neither warnings nor log messages below errors are shown."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@quiet()
def config_of(fields: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    settings = dict(fields)
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


@quiet()
def config_for(request: PlanRequest) -> tuple[Any, list[str]]:
    """The configuration of the model; if it cannot be read, that of our table, with a note."""
    from hf_rocm_tune.models.factory import ModelSource, read_config

    try:
        return read_config(ModelSource(request.model, request.revision, request.trust_remote_code)), []
    except UsageError:
        known = public_model(request.model)
        if known is None:
            raise
    note = f"its configuration could not be read; planned with the known shape of {known.name}"
    return config_of(known.fields), [note]


def text_config(config: Any, *, decoder: bool = False) -> Any:
    """The part of a configuration that describes the language model; all of it if there are no parts."""
    for only_decoder in (decoder or None, True):  # False would mean the encoder's
        with suppress(ValueError):  # several, as in a text encoder with another decoder
            return config.get_text_config(decoder=only_decoder)
    return config


def longest_position(config: Any) -> int | None:
    """Tokens that a model was made for; None if its configuration has no limit."""
    text = text_config(config)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


# ---- public models ----------------------------------------------------------------------------------------------


class PublicModel(NamedTuple):
    """A public model's shape, for ``--largest`` and for a Hub that cannot be reached."""

    name: str  # Hub id
    billions: float  # published number of parameters, in units of 10^9, without a layer for multi-token prediction
    fields: Mapping[str, Any]  # of its ``config.json`` on the Hub, without transformers' defaults
    listed: bool = True  # whether ``--largest`` plans it


def _family(architecture: str, vocabulary: int, positions: int, **more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": positions}
    return {"architectures": [f"{architecture}ForCausalLM"], **sizes, **more}


_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _family("Llama", 128256, 131072),
    "qwen3": _family("Qwen3", 151936, 40960, head_dim=128),
    "qwen2": _family("Qwen2", 152064, 32768),
    "mistral": _family("Mistral", 131072, 32768, head_dim=128, sliding_window=None),
    "gemma3_text": _family("Gemma3", 262144, 32768, head_dim=256, sliding_window=512),
    "phi3": _family("Phi3", 100352, 16384, original_max_position_embeddings=16384, pad_token_id=100349),
    "qwen3_moe": _family("Qwen3Moe", 151936, 40960, head_dim=128, router_aux_loss_coef=0.001),
    "olmoe": _family("Olmoe", 50304, 4096),
    "gpt_oss": _family("GptOss", 201088, 131072, head_dim=64, sliding_window=128, router_aux_loss_coef=0.9)
    | {"attention_bias": True},
}
_WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _model(name: str, billions: float, family: str, *widths: int, tied: bool = False, **more: Any) -> PublicModel:
    own = {"model_type": family, "tie_word_embeddings": tied, **dict(zip(_WIDTHS, widths, strict=True))}
    return PublicModel(name=name, billions=billions, fields=_FAMILIES[family] | own | more)


def _seeing(
    name: str, billions: float, family: str, architecture: str, text: dict[str, Any], *widths: int, **more: Any
) -> PublicModel:
    """A model that reads pictures; ``widths``: of its language model."""
    own = {"model_type": family, "architectures": [architecture], "tie_word_embeddings": False}
    described = {**text, **dict(zip(_WIDTHS, widths, strict=True))}
    return PublicModel(name=name, billions=billions, fields={**own, "text_config": described, **more}, listed=False)


_QWEN35_TEXT: dict[str, Any] = {"model_type": "qwen3_5_text", "vocab_size": 248320, "max_position_embeddings": 262144}
_QWEN35_TEXT |= {"head_dim": 256, "linear_num_key_heads": 16}
_QWEN35 = ("qwen3_5", "Qwen3_5ForConditionalGeneration")
_QWEN3_VL_TEXT: dict[str, Any] = {"model_type": "qwen3_vl_text", "vocab_size": 151936, "head_dim": 128}
_QWEN3_VL_TEXT |= {"max_position_embeddings": 262144}
_QWEN3_VL = ("qwen3_vl", "Qwen3VLForConditionalGeneration")
_MINISTRAL_TEXT: dict[str, Any] = {"model_type": "ministral3", "vocab_size": 131072, "head_dim": 128}
_MINISTRAL_TEXT |= {"max_position_embeddings": 262144}
_MISTRAL3 = ("mistral3", "Mistral3ForConditionalGeneration")
_PIXTRAL: dict[str, Any] = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14}
_PIXTRAL |= {"image_size": 1540, "num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 64}
_GEMMA4_TEXT: dict[str, Any] = {"model_type": "gemma4_unified_text", "vocab_size": 262144, "head_dim": 256}
_GEMMA4_TEXT |= {"global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
_GEMMA4_TEXT |= {"max_position_embeddings": 262144, "final_logit_softcapping": 30.0, "tie_word_embeddings": True}
_GEMMA4 = ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration")
_GLM_FLASH: dict[str, Any] = {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}
_GLM_FLASH |= {"vocab_size": 154880, "max_position_embeddings": 202752, "hidden_size": 2048, "num_hidden_layers": 47}
_GLM_FLASH |= {"intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64}
_GLM_FLASH |= {"num_experts_per_tok": 4, "n_shared_experts": 1, "num_attention_heads": 20, "num_key_value_heads": 20}
_GLM_FLASH |= {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
_GLM_FLASH |= {"v_head_dim": 256, "tie_word_embeddings": False}
_PHI4_MINI: dict[str, Any] = {"vocab_size": 200064, "max_position_embeddings": 131072, "pad_token_id": 199999}
_PHI4_MINI |= {"original_max_position_embeddings": 4096}
_OSS: dict[str, Any] = {"num_local_experts": 32, "num_experts_per_tok": 4}
_OSS |= {"quantization_config": {"quant_method": "mxfp4"}}
_QWEN3_A3B: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
PUBLIC_MODELS: tuple[PublicModel, ...] = (
    _model("Qwen/Qwen3-0.6B", 0.60, "qwen3", 1024, 3072, 28, 16, 8, tied=True),
    _model("google/gemma-3-1b-pt", 1.00, "gemma3_text", 1152, 6912, 26, 4, 1, tied=True),
    _model("meta-llama/Llama-3.2-1B", 1.24, "llama", 2048, 8192, 16, 32, 8, tied=True),
    _model("meta-llama/Llama-3.2-3B", 3.21, "llama", 3072, 8192, 28, 24, 8, tied=True),
    _model("microsoft/Phi-4-mini-instruct", 3.84, "phi3", 3072, 8192, 32, 24, 8, tied=True, **_PHI4_MINI),
    _model("Qwen/Qwen3-4B", 4.02, "qwen3", 2560, 9728, 36, 32, 8, tied=True),
    _model("allenai/OLMoE-1B-7B-0924", 6.92, "olmoe", 2048, 1024, 16, 16, 16, num_experts=64, num_experts_per_tok=8),
    _model("mistralai/Mistral-7B-v0.3", 7.25, "mistral", 4096, 14336, 32, 32, 8, vocab_size=32768, head_dim=None),
    _model("meta-llama/Llama-3.1-8B", 8.03, "llama", 4096, 14336, 32, 32, 8),
    _model("Qwen/Qwen3-8B", 8.19, "qwen3", 4096, 12288, 36, 32, 8),
    _model("microsoft/phi-4", 14.66, "phi3", 5120, 17920, 40, 40, 10),
    _model("Qwen/Qwen3-14B", 14.77, "qwen3", 5120, 17408, 40, 40, 8),
    _model("openai/gpt-oss-20b", 20.91, "gpt_oss", 2880, 2880, 24, 64, 8, **_OSS),
    _model("mistralai/Mistral-Small-24B-Base-2501", 23.57, "mistral", 5120, 32768, 40, 32, 8),
    _model("Qwen/Qwen3-30B-A3B", 30.53, "qwen3_moe", 2048, 6144, 48, 32, 4, **_QWEN3_A3B),
    _model("Qwen/Qwen2.5-32B", 32.76, "qwen2", 5120, 27648, 64, 40, 8),
    _model("Qwen/Qwen3-32B", 32.76, "qwen3", 5120, 25600, 64, 64, 8),
    _seeing(
        *("Qwen/Qwen3.5-9B", 9.41, *_QWEN35, {**_QWEN35_TEXT, "linear_num_value_heads": 32}, 4096, 12288, 32, 16, 4),
        vision_config={"model_type": "qwen3_5_vision", "out_hidden_size": 4096},
    ),
    _seeing(
        *("Qwen/Qwen3.6-27B", 27.36, *_QWEN35, {**_QWEN35_TEXT, "linear_num_value_heads": 48}, 5120, 17408, 64, 24, 4),
        vision_config={"model_type": "qwen3_5_vision", "out_hidden_size": 5120},
    ),
    _seeing(
        *("Qwen/Qwen3-VL-8B-Instruct", 8.77, *_QWEN3_VL, _QWEN3_VL_TEXT, 4096, 12288, 36, 32, 8),
        vision_config={"model_type": "qwen3_vl_vision", "out_hidden_size": 4096},
    ),
    _seeing(
        *("mistralai/Ministral-3-8B-Instruct-2512-BF16", 8.92, *_MISTRAL3, _MINISTRAL_TEXT, 4096, 14336, 34, 32, 8),
        vision_config=_PIXTRAL,
    ),
    _seeing(
        *("google/gemma-4-12B-it", 11.96, *_GEMMA4, _GEMMA4_TEXT, 3840, 15360, 48, 16, 8),
        tie_word_embeddings=True,
        vision_config={"model_type": "gemma4_unified_vision"},
    ),
    PublicModel(name="zai-org/GLM-4.7-Flash", billions=29.94, fields=_GLM_FLASH, listed=False),
    _model("meta-llama/Llama-3.3-70B-Instruct", 70.55, "llama", 8192, 28672, 80, 64, 8),
)


def public_model(name: str) -> PublicModel | None:
    """The entry of a Hub id, or of its chat-tuned variant, which has the same shape."""

    def stem(text: str) -> str:
        return re.sub(r"-(instruct|it|base|pt|chat|\d{4})(?=-|$)", "", text.lower())

    return next((model for model in PUBLIC_MODELS if stem(model.name) == stem(name)), None)
