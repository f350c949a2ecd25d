"""A model to talk to or to measure: a base with its adapter, a merged model, or one from the Hub, through one door.

Weights and adapter pass the mover, as in training: every tensor is digested on the host and again on the device. The
line that `loaded_model` says tells how much of what lies on the device was verified, and whether the files themselves
are the ones that somebody recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.casts import cast_verified
from hf_rocm_tune.models.factory import ModelSource, attest_files, check_source, load_model, load_tokenizer
from hf_rocm_tune.models.placement import coverage, place
from hf_rocm_tune.publish.generate_settings import LoadSettings
from hf_rocm_tune.publish.merge_adapter import WEIGHTS_FILE, Adapter, find_adapter, open_adapter
from hf_rocm_tune.publish.merge_attach import attach
from hf_rocm_tune.publish.merge_base import base_of
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model that is ready.

    Attributes:
        name: as the user gave it.
        model: in evaluation mode, a `PeftModel` where there is an adapter.
        tokenizer: the adapter's where it has one, else the base's.
        mover: the door for inputs.
        adapter: None for a whole model.
        base: name of the model below the adapter, or of the model.
        verified: what `coverage` found and what the files are known to be, as plain values for a report.
    """

    name: str
    model: Any
    tokenizer: PreTrainedTokenizerBase
    mover: Mover
    adapter: Adapter | None
    base: str
    verified: dict[str, Any]

    def without_adapter(self) -> AbstractContextManager[Any]:
        """Within the block the base answers alone."""
        disabled: AbstractContextManager[Any] = self.model.disable_adapter() if self.adapter else nullcontext()
        return disabled

    def place(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Bring host tensors to the model, verified."""
        placed: dict[str, Tensor] = self.mover.begin(inputs)
        self.mover.settle(placed)
        return placed

    @property
    def context_length(self) -> int | None:
        """Tokens that fit, as the configuration says; None where it does not."""
        config = self.model.config.get_text_config()
        length = getattr(config, "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None


@contextmanager
def loaded_model(settings: LoadSettings, say: Say) -> Iterator[Loaded]:
    """Load, say what was verified, and close the door at the end.

    Raises:
        UsageError: what is asked for is not there, damaged, or does not fit together.
        CorruptionError: a tensor could not be brought over right.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    has_adapter = find_adapter(settings.model, settings.revision) is not None
    if settings.base and not has_adapter:
        raise UsageError(f"--base {settings.base}: {settings.model} is no adapter, so it has no base: leave it out")
    adapter = open_adapter(settings.model, settings.revision) if has_adapter else None
    source = _source(settings, adapter)
    check_source(source, device)
    with Mover(device, settings=TransferSettings(), faults=FaultSpec.from_environment()) as mover:
        if (faults := mover.fault_injection()) is not None:
            say(f"faults are injected on request: {faults}")
        model: Any
        with _quiet_unless_terminal():
            model, seconds = load_model(source, mover)
        if not model.can_generate():
            raise UsageError(f"{source.name} is a {type(model).__name__}, which makes no text: give a language model")
        if adapter is not None:
            say(adapter.described)
            model = attach(model, adapter, _placer(mover, model.dtype, quantised=settings.load_in_4bit))
            place(model, mover)
            if adapter.trained_in_bits == 4 and not settings.load_in_4bit:
                say(
                    "it was trained on 4-bit weights and the base is loaded as it is; --load_in_4bit quantises it again"
                )
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


@contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    """No progress bars in a log or a pipe."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _source(settings: LoadSettings, adapter: Adapter | None) -> ModelSource:
    base = base_of(adapter, settings.base) if adapter else None
    init: dict[str, Any] = {"dtype": settings.dtype}
    if settings.load_in_4bit and settings.dtype == "auto":
        init["dtype"] = "bfloat16"  # as the QLoRA runs of this package
    if settings.attn_implementation:
        init["attn_implementation"] = settings.attn_implementation
    return ModelSource(
        name=base.name if base else settings.model,
        revision=(base.revision if base else settings.revision) or "main",
        trust_remote_code=settings.trust_remote_code,
        init=init,
        quantization=_quantization(init["dtype"], adapter) if settings.load_in_4bit else None,
    )


def _quantization(dtype: str, adapter: Adapter | None) -> Any:
    """As the adapter's run quantised, else as a run of this package does by default."""
    from transformers import BitsAndBytesConfig

    known = adapter.settings if adapter else {}
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_type=known.get("bnb_4bit_quant_type") or "nf4",
        bnb_4bit_use_double_quant=known.get("use_bnb_nested_quant", True),
    )


def _placer(mover: Mover, dtype: torch.dtype, *, quantised: bool) -> Callable[[Tensor, str], Tensor]:
    """Brings an adapter's tensors to the device; whole modules take the dtype of the model.

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
    own = adapter is not None and (adapter.directory / "tokenizer_config.json").is_file()
    where = str(adapter.directory) if adapter is not None and own else source.name
    loaded: Any = load_tokenizer(
        ModelSource(
            name=where,
            revision="main" if own else source.revision,
            trust_remote_code=source.trust_remote_code,
        )
    )
    tokenizer: PreTrainedTokenizerBase = getattr(loaded, "tokenizer", loaded)  # of a processor for several modalities
    return tokenizer


def _verified(model: Any, mover: Mover, source: ModelSource) -> dict[str, Any]:
    records = attest_files(source, mover)
    found = coverage(model, mover)
    counted = mover.report.to_dict()
    stages = [counted["weights"], counted["adapter"]]
    return {
        "tensors": int(sum(stage["tensors"] for stage in stages)),
        "bytes": int(sum(stage["bytes"] for stage in stages)),
        "mismatches": int(sum(stage["mismatches"] for stage in stages)),
        "recovered": int(sum(stage["recovered"] for stage in stages)),
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
        f"{Path(name).name if Path(name).is_dir() else name}: {verified['tensors']:,} tensors, "
        f"{verified['bytes'] / 1e9:.3g} GB loaded in {seconds:.1f} s{trouble}; {share:.4g} % of the bytes on the "
        f"device verified{f' (not: {missing})' if missing else ''}; weight files attested "
        f"{verified['files_attested']}, not attested {len(verified['files_not_attested'])}"
    )
