"""Input of the planner: a job's settings, the card, a model's configuration or published shape. Imports no torch."""

from __future__ import annotations

import logging
import os
import re
import socket
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hf_rocm_tune.errors import UsageError, first_line
from hf_rocm_tune.machine.cards import CARDS, Card
from hf_rocm_tune.machine.survey import Machine, survey
from hf_rocm_tune.models.streamed import FLAG, parse
from hf_rocm_tune.paths import expand_user
from hf_rocm_tune.plan.estimate import DESKTOP_BYTES, GIB, RATES_OF, CardMemory, Rates, optimizer

METHODS = ("lora", "qlora", "full")
TRAINERS = ("sft", "dpo", "kto")
PLATFORMS = ("hip", "cuda", "cpu")
DTYPES = ("bfloat16", "float16", "float32")
ATTENTIONS = ("sdpa", "eager")
ALL_LINEAR = "all-linear"
DEFAULT_OPTIMIZER = "adamw_torch_fused"
_LARGEST_BATCH = 1 << 16  # every divisor is a case


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request to the planner; invalid values are named in a UsageError."""

    model: str = ""  # directory or Hub id; only the configuration is read. Empty if a configuration is passed
    revision: str = "main"
    trust_remote_code: bool = False
    trainer: str = "sft"  # of `TRAINERS`
    methods: tuple[str, ...] = ("lora", "qlora")  # to choose from, of `METHODS`
    length: int = 2048  # tokens of the longest sequence
    effective_batch: int = 16  # sequences (``dpo``: pairs) per optimizer step, over all cards
    cards: int = 1  # each with the whole model
    packing: bool = False  # several sequences in a row
    rank: int = 16
    dropout: float = 0.0  # of the adapters
    targets: str | tuple[str, ...] = ALL_LINEAR
    target_parameters: tuple[str, ...] = ()  # of fused experts
    modules_to_save: tuple[str, ...] = ()
    dora: bool = False
    nested: bool = True  # constants of 4-bit weights are quantised too
    # of weights that are not quantised; None: ``bfloat16`` below adapters, ``float32`` when all are trained
    dtype: str | None = None
    autocast: bool = True  # mixed precision in bfloat16
    attention: str = "sdpa"  # of `ATTENTIONS`
    optim: str = DEFAULT_OPTIMIZER  # optimizer, by transformers' name
    platform: str = "hip"  # whose kernels count
    triton: bool = True  # whether Triton's run there
    workers: int = 0  # data loader workers, for the host's memory
    rows: int = 0  # of the dataset, to estimate hours; 0: unknown
    micro_batch: int | None = None  # only this one; None: all divisors of the effective batch
    eval_batch: int | None = None  # of evaluation; None: the largest up to 8 that needs no more than a training step
    evaluates: bool = True
    checkpointing: bool | None = None  # only with (True) or without (False)
    recompute: tuple[int, int] | None = None  # only this mix; see `estimate.Case`
    mixes: bool = True  # consider mixes of recomputation
    one_pass_loss: bool = False  # see `models.loss`
    stream: int = 0  # layers whose weights are streamed, or `AUTO`; see `models.streaming`

    def __post_init__(self) -> None:
        least = {"seq": (self.length, 2), "effective_batch": (self.effective_batch, 1), "cards": (self.cards, 1)}
        least |= {"rank": (self.rank, 1), "eval_batch": (self.eval_batch or 1, 1)}
        least |= {"workers": (self.workers, 0), "rows": (self.rows, 0)}
        faults = [f"--{name} must be {low} or more, got {value}" for name, (value, low) in least.items() if value < low]
        batch, full = self.effective_batch, "full" in self.methods
        if batch > _LARGEST_BATCH:
            faults.append(f"--effective_batch must be {_LARGEST_BATCH} or less, got {batch}")
        if not faults and batch % self.cards:
            faults.append(f"--effective_batch {batch} cannot be divided evenly over {self.cards} cards")
        if self.micro_batch is not None and (self.micro_batch < 1 or self.each % self.micro_batch):
            faults.append(f"--batch_size {self.micro_batch} does not divide the {self.each} sequences of a card")
        if not 0 <= self.dropout < 1:
            faults.append(f"--dropout must be 0 or more and below 1, got {self.dropout}")
        if self.trainer != "sft" and (self.packing or self.one_pass_loss):
            faults.append(f"--packing and --one_pass_loss are for sft, not {self.trainer}")
        if self.trainer == "kto" and (self.micro_batch or self.each) < 2:
            faults.append("kto needs two or more sequences in a micro-batch: its KL estimate pairs them")
        if full and (self.stream or self.dora or self.modules_to_save or self.target_parameters):
            ours = f"--dora, --target_parameters, --modules_to_save and {FLAG}"
            faults.append(f"{ours} are for adapters: leave them out with --method full")
        if self.stream and self.dora:
            faults.append(f"{FLAG} does not support --dora: leave one out")
        choices: list[tuple[str, str, tuple[str, ...]]] = [("method", each, METHODS) for each in self.methods]
        choices += [("trainer", self.trainer, TRAINERS), ("platform", self.platform, PLATFORMS)]
        choices += [("dtype", self.dtype or DTYPES[0], DTYPES), ("attention", self.attention, ATTENTIONS)]
        for name, given, known in choices:
            faults += [] if given in known else [f"--{name} must be one of {', '.join(known)}, got {given}"]
        if faults:
            raise UsageError("; ".join(faults))
        optimizer(self.optim)

    @property
    def each(self) -> int:
        return self.effective_batch // max(self.cards, 1)

    def dtype_of(self, method: str) -> str:
        return self.dtype or ("float32" if method == "full" else "bfloat16")


def as_targets(words: Sequence[str]) -> str | tuple[str, ...]:
    alone = len(words) == 1 and not re.fullmatch(r"[\w.]+", words[0])
    return words[0] if alone else tuple(words)


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
    lora = bool(settings.get("use_peft"))
    targets = settings.get("lora_target_modules") or ALL_LINEAR
    each = int(settings["per_device_train_batch_size"]) * int(settings["gradient_accumulation_steps"])
    dtype = settings.get("dtype")
    mix = settings.get("recompute_layers")
    return PlanRequest(
        model=str(settings["model_name_or_path"]),
        revision=str(settings.get("model_revision") or "main"),
        trust_remote_code=bool(settings.get("trust_remote_code")),
        trainer=trainer,
        methods=("full",) if not lora else ("qlora",) if settings.get("load_in_4bit") else ("lora",),
        length=int(settings["max_length"]),
        effective_batch=cards * each,
        cards=cards,
        packing=bool(settings.get("packing")),
        rank=int(settings["lora_r"]),
        # TRL turns dropout off for preferences
        dropout=0.0 if settings.get("disable_dropout") else float(settings["lora_dropout"]),
        targets=as_targets([targets] if isinstance(targets, str) else targets),
        target_parameters=tuple((lora and settings.get("lora_target_parameters")) or ()),
        modules_to_save=tuple((lora and settings.get("lora_modules_to_save")) or ()),
        dora=lora and bool(settings.get("use_dora")),
        nested=bool(settings.get("use_bnb_nested_quant")),
        # TRL's `auto` and None load the file's dtype, nearly always bfloat16
        dtype="bfloat16" if dtype in ("auto", None) else str(dtype),
        autocast=bool(settings.get("bf16")),
        attention="eager" if settings.get("attn_implementation") == "eager" else "sdpa",
        optim=str(settings["optim"]),
        platform=platform,
        workers=int(settings.get("dataloader_num_workers") or 0),
        recompute=None if mix is None else parse_counts(str(mix)),
        mixes=not settings.get("torch_compile"),
        stream=parse(str(settings.get("stream_weights") or "off")),
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
    for flag, given, least in (("--vram", vram_gib, 1), ("--desktop_gib", desktop_gib, 0)):
        if given is not None and not least <= given <= 1024:
            raise UsageError(f"{flag} must be from {least} to 1024 GiB, got {given:g}")
    gpus = (survey() if machine is None else machine).gpus
    described = [gpu for gpu in gpus if gpu.sensors.vram_total_bytes and not gpu.integrated]
    here = max(described, key=lambda gpu: gpu.sensors.vram_total_bytes or 0, default=None)
    known = None if vram_gib is not None else _named(name) if name else here.card if here else _named("rx7900xt")
    size = vram_gib or (known.vram_gib if known else None)
    if size is None and name is None and here is not None:  # a card whose memory the table does not have
        size = (here.sensors.vram_total_bytes or 0) / GIB
    if size is None:
        raise UsageError(f"the memory of {known.name if known else name} is not in the card table; give --vram in GiB")
    rates = Rates(known=False)  # of most cards no speed is published, and only choices are ranked
    if known is not None and known.bf16_tflops:
        rates = replace(RATES_OF.get(known.key, Rates()), products=1e12 * known.bf16_tflops)
    desktop, source = DESKTOP_BYTES, "assumed"
    same = here is not None and abs((here.sensors.vram_total_bytes or 0) / GIB - size) < 1
    if desktop_gib is not None:
        desktop, source = int(desktop_gib * GIB), "given"
    elif here is not None and same and here.sensors.vram_used_bytes is not None:
        desktop, source = here.sensors.vram_used_bytes, f"read from the card at {here.address}"
    return CardMemory(
        name=known.name if known else f"a card of {size:g} GiB",
        usable=int(size * _USABLE_SHARE * GIB),
        desktop=desktop,
        desktop_source=source,
        rates=rates,
        bandwidth=1e9 * (known.bandwidth_gb_s if known and known.bandwidth_gb_s else _USUAL_BANDWIDTH),
    )


def _named(name: str) -> Card:
    def letters(text: str) -> str:  # without spaces, dashes and common words
        return re.sub(r"[^a-z0-9]|\b(amd|radeon|rx|pro|ai|instinct)\b|^rx", "", text.lower())

    for card in CARDS:
        if letters(name) in (letters(card.key), letters(card.name)):
            return card
    names = ", ".join(letters(card.key) for card in CARDS)
    raise UsageError(f"--gpu {name} is not in the card table; it has {names}. Or give --vram in GiB")


#: Errors of modelling code on a configuration or tensor that it does not support.
FOREIGN_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError),
    *(LookupError, RuntimeError, TypeError, ValueError),
)


class TooManyOperations(UsageError):
    """A step with too many operations to record, most often because it loops over tokens."""


def load_config(name: str, *, revision: str = "main", trust_remote_code: bool = False) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from hf_rocm_tune.models.factory import check_architecture

    path = expand_user(name)
    local = os.path.exists(path) or name.startswith((".", "/", "~"))
    if local and not os.path.isfile(path / "config.json"):
        raise UsageError(f"model: {name} has no config.json: give a model directory or a Hub id")
    fix = "download or copy it again" if local else "check the spelling, the network and HF_HUB_OFFLINE"
    try:
        with quiet():
            where = str(path) if local else name
            how = {"revision": revision, "local_files_only": not local and not _hub_answers()}
            config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **how)
    except (*FOREIGN_ERRORS, OSError, StrictDataclassError) as error:
        raise UsageError(f"model {name}: its configuration cannot be read: {first_line(error)}; {fix}") from error
    check_architecture(config, name)
    return config


def config_of(fields: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    rest = dict(fields)
    with quiet():
        return AutoConfig.for_model(rest.pop("model_type"), **rest)


def config_for(request: PlanRequest) -> tuple[Any, list[str]]:
    """The configuration of the model; if it cannot be read, that of our table, with a note."""
    try:
        return load_config(request.model, revision=request.revision, trust_remote_code=request.trust_remote_code), []
    except UsageError:
        if (known := public_model(request.model)) is None:
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
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return next((value for key in names if isinstance(value := getattr(text, key, None), int) and value > 0), None)


def _hub_answers(patience: float = 3.0) -> bool:
    """Whether the Hub can be reached; its client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=patience).close()
    except OSError:
        return False
    return True


@contextmanager
def quiet() -> Iterator[None]:
    import transformers  # sets its level when it is imported  # noqa: F401

    loggers = [logging.getLogger(name) for name in ("transformers", "bitsandbytes")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


# ---- public models ----------------------------------------------------------------------------------------------


class PublicModel(NamedTuple):
    """A public model's shape, for ``--largest`` and for a Hub that cannot be reached."""

    name: str  # Hub id
    billions: float  # published number of parameters, in units of 10^9
    fields: Mapping[str, Any]  # of its ``config.json`` on the Hub, without transformers' defaults


def _family(architecture: str, vocabulary: int = 0, positions: int = 0, **more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": positions} if vocabulary else {}
    return {"architectures": [f"{architecture}ForCausalLM"], **sizes, **more}


_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _family("Llama", 128256, 131072),
    "qwen3": _family("Qwen3", 151936, 40960, head_dim=128),
    "qwen2": _family("Qwen2", 152064, 32768),
    "mistral": _family("Mistral", 131072, 32768, head_dim=128, sliding_window=None),
    "gemma3_text": _family("Gemma3", 262144, 32768, head_dim=256, sliding_window=512),
    "phi3": _family("Phi3"),
    "qwen3_moe": _family("Qwen3Moe", 151936, 40960, head_dim=128, router_aux_loss_coef=0.001),
    "olmoe": _family("Olmoe", 50304, 4096),
    "mixtral": _family("Mixtral", 32000, 32768, num_local_experts=8, num_experts_per_tok=2),
    "deepseek_v2": _family("DeepseekV2", 102400, 163840, moe_intermediate_size=1408, n_routed_experts=64)
    | {"n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512}
    | {"q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "gpt_oss": _family("GptOss", 201088, 131072, head_dim=64, sliding_window=128, router_aux_loss_coef=0.9)
    | {"attention_bias": True},
}
_WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _model(name: str, billions: float, family: str, *widths: int, tied: bool = False, **more: Any) -> PublicModel:
    own = {"model_type": family, "tie_word_embeddings": tied, **dict(zip(_WIDTHS, widths, strict=True))}
    return PublicModel(name=name, billions=billions, fields=_FAMILIES[family] | own | more)


def _phi4(vocabulary: int, positions: int, original: int, pad: int) -> dict[str, Any]:
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": positions, "pad_token_id": pad}
    return sizes | {"original_max_position_embeddings": original}


_PHI4_MINI, _PHI4 = _phi4(200064, 131072, 4096, 199999), _phi4(100352, 16384, 16384, 100349)
_OSS: dict[str, Any] = {"num_local_experts": 32, "num_experts_per_tok": 4}
_OSS |= {"quantization_config": {"quant_method": "mxfp4"}}
_NEMO: dict[str, Any] = {"max_position_embeddings": 131072}
_QWEN3_A3B: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
PUBLIC_MODELS: tuple[PublicModel, ...] = (
    _model("Qwen/Qwen3-0.6B", 0.60, "qwen3", 1024, 3072, 28, 16, 8, tied=True),
    _model("google/gemma-3-1b-pt", 1.00, "gemma3_text", 1152, 6912, 26, 4, 1, tied=True),
    _model("meta-llama/Llama-3.2-1B", 1.24, "llama", 2048, 8192, 16, 32, 8, tied=True),
    _model("Qwen/Qwen3-1.7B", 1.72, "qwen3", 2048, 6144, 28, 16, 8, tied=True),
    _model("meta-llama/Llama-3.2-3B", 3.21, "llama", 3072, 8192, 28, 24, 8, tied=True),
    _model("microsoft/Phi-4-mini-instruct", 3.84, "phi3", 3072, 8192, 32, 24, 8, tied=True, **_PHI4_MINI),
    _model("Qwen/Qwen3-4B", 4.02, "qwen3", 2560, 9728, 36, 32, 8, tied=True),
    _model("allenai/OLMoE-1B-7B-0924", 6.92, "olmoe", 2048, 1024, 16, 16, 16, num_experts=64, num_experts_per_tok=8),
    _model("mistralai/Mistral-7B-v0.3", 7.25, "mistral", 4096, 14336, 32, 32, 8, vocab_size=32768, head_dim=None),
    _model("meta-llama/Llama-3.1-8B", 8.03, "llama", 4096, 14336, 32, 32, 8),
    _model("Qwen/Qwen3-8B", 8.19, "qwen3", 4096, 12288, 36, 32, 8),
    _model("mistralai/Mistral-Nemo-Base-2407", 12.25, "mistral", 5120, 14336, 40, 32, 8, **_NEMO),
    _model("microsoft/phi-4", 14.66, "phi3", 5120, 17920, 40, 40, 10, **_PHI4),
    _model("Qwen/Qwen3-14B", 14.77, "qwen3", 5120, 17408, 40, 40, 8),
    _model("deepseek-ai/DeepSeek-V2-Lite", 15.71, "deepseek_v2", 2048, 10944, 27, 16, 16),
    _model("openai/gpt-oss-20b", 20.91, "gpt_oss", 2880, 2880, 24, 64, 8, **_OSS),
    _model("mistralai/Mistral-Small-24B-Base-2501", 23.57, "mistral", 5120, 32768, 40, 32, 8),
    _model("Qwen/Qwen3-30B-A3B", 30.53, "qwen3_moe", 2048, 6144, 48, 32, 4, **_QWEN3_A3B),
    _model("Qwen/Qwen2.5-32B", 32.76, "qwen2", 5120, 27648, 64, 40, 8),
    _model("Qwen/Qwen3-32B", 32.76, "qwen3", 5120, 25600, 64, 64, 8),
    _model("mistralai/Mixtral-8x7B-v0.1", 46.70, "mixtral", 4096, 14336, 32, 32, 8),
    _model("meta-llama/Llama-3.1-70B", 70.55, "llama", 8192, 28672, 80, 64, 8),
    _model("meta-llama/Llama-3.3-70B-Instruct", 70.55, "llama", 8192, 28672, 80, 64, 8),
)


def public_model(name: str) -> PublicModel | None:
    """The entry of a Hub id, or of its chat-tuned variant, which has the same shape."""

    def stem(text: str) -> str:
        return re.sub(r"-(instruct|it|base|pt|chat|\d{4})(?=-|$)", "", text.lower())

    return next((model for model in PUBLIC_MODELS if stem(model.name) == stem(name)), None)
