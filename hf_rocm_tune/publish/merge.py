"""``hf-rocm-tune merge``: merges an adapter into its base on the host, verified on disk.

PEFT's layers merge, one at a time and in float32, into the original (never quantised) base, and the result is rounded
once. A base that does not fit into memory stands in unlinked files beside the result meanwhile. The result is renamed
into place when every file has been read back. Where the two sides of tied embeddings now differ, both are stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from huggingface_hub import ModelCardData
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.foreign import read_object
from hf_rocm_tune.models import base_files
from hf_rocm_tune.models.factory import ModelSource, attest_files, check_source, is_pickled, load_model
from hf_rocm_tune.models.files import GENERATION_FILE, FileRecords, check_model_directory
from hf_rocm_tune.publish import vocabulary
from hf_rocm_tune.publish.leftovers import Leftovers, add_leftovers, leftovers_of
from hf_rocm_tune.survive import manifest, saved_state
from hf_rocm_tune.survive.atomic import clean_leftovers, staged_directory
from hf_rocm_tune.survive.manifest import FileEntry
from hf_rocm_tune.survive.saved_adapter import NAME, WEIGHTS_FILE, Adapter, Base, attach, base_of, open_adapter
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

_SPARE_MEMORY = 2 << 30  # beside the weights: this process, the largest layer in float32
_INDEX_FILE = "model.safetensors.index.json"
_COPIED_FILES = re.compile(r".*processor_config\.json|processor.*\.json|.*\.py|(LICENSE|NOTICE|USE_POLICY).*")


def merge(
    adapter_name: str,
    out: Path,
    *,
    base_name: str | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Merge an adapter into its base; gives the directory of the merged model.

    Args:
        adapter_name: a directory, or an id on the Hub.
        out: the directory to write; it may not exist, or must be empty.
        base_name: None: the base that the adapter names.
        dtype: name of the dtype to store; None: that of each weight of the base.
        max_shard_size: of a weight file, as of ``save_pretrained``.
        trust_remote_code: run the base's own code.
        say: is given each line for the user.

    Raises:
        UsageError: wrong input, or the result cannot be written.
        CorruptionError: a tensor was loaded or read back wrong.
    """
    out = out.resolve()
    _require_empty(out)
    adapter = open_adapter(adapter_name)
    say(adapter.described)
    base = base_of(adapter, base_name)
    directory = base.download()
    nbytes = _check_base(directory)
    exceeds_memory = nbytes + _SPARE_MEMORY > psutil.virtual_memory().available
    if adapter.trained_in_bits:
        say(
            f"it was trained on {adapter.trained_in_bits}-bit weights and is merged into the original ones: the result "
            "differs from the model in training by the quantisation error"
        )
    if exceeds_memory:
        say(f"the base takes {nbytes / 1e9:.3g} GB, more than is available in memory: it stands on disk meanwhile")
    source = ModelSource(
        name=str(directory),
        trust_remote_code=trust_remote_code,
        reward=adapter.is_reward,
        init={"dtype": "auto"},
        packed=False,
    )
    stored_dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
    started = time.perf_counter()
    loaded = _load_base(source, directory, disk=out.parent if exceeds_memory else None)
    say(f"base {base.name}: {nbytes / 1e9:.3g} GB loaded, {_what_was_compared(source, loaded.records)}")
    for line in loaded.leftovers.lines(reward=adapter.is_reward):
        say(line)

    merged, layers, lost_tie = _merged(loaded.model, adapter, stored_dtype)
    if lost_tie:
        say("lm_head.weight is no longer tied: the adapter changed the two sides differently")

    leftovers: Leftovers | None = None
    if loaded.leftovers.tensors and not adapter.is_reward:  # a reward model has no use for a language model's head
        leftovers = loaded.leftovers
    try:
        with staged_directory(out) as staging:
            files = _small_files(directory, adapter, merged.config, trust_remote_code=trust_remote_code)
            files["README.md"] = merged_readme(base.hub_id, adapter.method, reward=adapter.is_reward).encode()
            stored = _write(
                merged,
                staging,
                small_files=files,
                max_shard_size=max_shard_size,
                trained=adapter.written,
                origin=_origin(adapter, base, loaded),
                leftovers=leftovers,
            )
    except (OSError, SafetensorError) as error:
        raise _unwritable(out, error) from error
    seconds = time.perf_counter() - started
    say(
        f"merged {layers} layers in float32, stored {stored / 1e9:.3g} GB in {seconds:.1f} s; "
        "every file was read back and equals what was computed"
    )
    return out


def _require_empty(out: Path) -> None:
    """Refuse a directory that holds something; what a killed merge has left beside it is removed."""
    if os.path.exists(out) and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: choose another directory, or remove it")
    if os.path.isdir(out.parent):
        clean_leftovers(out.parent)


def _unwritable(path: Path, error: Exception) -> UsageError:
    """One line for a disk that is full or cannot be written. safetensors has the system's error in words only."""
    why = getattr(error, "strerror", None) or error
    return UsageError(
        f"{path} cannot be written: {why}; nothing is left there: free some space, or name a directory that can be "
        "written"
    )


# ---- the base -------------------------------------------------------------------------------------------------------


def _check_base(directory: Path) -> int:
    """The bytes of the base's weights; those of experts in MXFP4 become 16 bits, four times as many."""
    files = check_model_directory(directory) or sorted(directory.glob("pytorch_model*.bin"))
    nbytes = sum(file.stat().st_size for file in files)
    quantised = read_object(directory / "config.json").get("quantization_config")
    if not quantised:
        return nbytes
    if isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4":
        return 4 * nbytes
    raise UsageError(
        f"{directory} is quantised, and no adapter can be merged into that: give the original model with --base"
    )


def _what_was_compared(source: ModelSource, records: FileRecords) -> str:
    """What is known of the base's bytes, for the user."""
    if is_pickled(source):
        return "from pickles (pytorch_model.bin), by torch and without the code in them; not compared with the files"
    return f"every tensor as in its file; attested {records.attested}, not attested {len(records.unknown)}"


@dataclass(frozen=True, kw_only=True)
class _LoadedBase:
    model: PreTrainedModel
    records: FileRecords  # of its weight files, by a second reading
    files: base_files.BaseRecord | None  # what they consist of, for who checks the result
    leftovers: Leftovers  # their tensors that have no place in the model


def _load_base(source: ModelSource, directory: Path, *, disk: Path | None) -> _LoadedBase:
    """The base on the host, verified. ``disk``: the directory whose disk holds its weights; None: memory does."""
    faults = FaultSpec.from_environment()
    with Mover(torch.device("cpu"), settings=TransferSettings(), faults=faults) as mover:
        check_source(source, mover.device)
        if disk is None:
            model, _ = load_model(source, mover)
        else:
            with _spilled(disk):
                model, _ = load_model(source, mover, on_host=True)
        return _LoadedBase(
            model=model,
            records=attest_files(source, mover),
            files=base_files.record(mover.loaded),
            leftovers=leftovers_of(directory, mover.loaded),
        )


# ---- in memory ------------------------------------------------------------------------------------------------------


@contextmanager
def _spilled(directory: Path) -> Iterator[None]:
    """Within the block every weight that is loaded is mapped to a file of its own that has no name."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from error

    def patched(stock: Callable[..., None]) -> Callable[..., None]:
        def set_weight(model: PreTrainedModel, target_name: str, param_value: Any, *rest: Any, **more: Any) -> None:
            stock(model, target_name, param_value, *rest, **more)
            value = model.get_parameter_or_buffer(target_name)
            if value.nbytes:
                try:
                    with tempfile.NamedTemporaryFile(dir=directory, prefix="_merge-") as file:
                        os.posix_fallocate(file.fileno(), 0, value.nbytes)  # a full disk must not end in a SIGBUS
                        mapped = torch.from_file(file.name, shared=True, size=value.numel(), dtype=value.dtype)
                except OSError as error:
                    raise _unwritable(directory, error) from error
                value.data = mapped.view(value.shape).copy_(value.data)  # device: both are on the host

        return set_weight

    with upstream.replaced("set_weight", patched):
        yield


def _merged(model: PreTrainedModel, adapter: Adapter, dtype: torch.dtype | None) -> tuple[PreTrainedModel, int, bool]:
    """The plain model with the adapter merged, how many layers that changed, and whether the head lost its tie."""
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    were_tied = head is not None and embeddings.weight is head.weight
    wrapped = attach(model, adapter, lambda tensor, _: tensor.clone())
    _untie(wrapped)
    dtypes = {id(parameter): parameter.dtype for parameter in model.parameters()}
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ties, and of layers that are merged already
            for name, layer in layers:
                _merge_layer(name, layer, dtype)
            merged: PreTrainedModel = wrapped.merge_and_unload(adapter_names=[NAME])
    except (ValueError, RuntimeError, NotImplementedError, KeyError) as error:
        raise UsageError(
            f"PEFT cannot merge {adapter.name}: {' '.join(str(error).split())}. Unmerged it can be used beside its "
            "base: `hf-rocm-tune generate`, or PEFT's PeftModel.from_pretrained"
        ) from error
    base_dtype = merged.config.dtype
    if not isinstance(base_dtype, torch.dtype):
        base_dtype = model.dtype
    for name, parameter in merged.named_parameters():
        if parameter.is_floating_point():  # whole modules come from the adapter's file, in its dtype
            _cast(name, parameter, dtype or dtypes.get(id(parameter), base_dtype))
        parameter.requires_grad_(False)
    lost_tie = were_tied and not _tie_again(merged)
    return merged, len(layers), lost_tie


def _merge_layer(name: str, layer: BaseTunerLayer, dtype: torch.dtype | None) -> None:
    """Merge one layer in float32; its weights keep their memory, unless the dtype changes."""
    owner = layer.get_base_layer()
    before = {key: parameter.data for key, parameter in owner.named_parameters(recurse=False)}
    layer.float()
    layer.merge(safe_merge=False, adapter_names=[NAME])
    for key, old in before.items():
        parameter = getattr(owner, key)
        new = parameter.data
        if dtype in (None, old.dtype) and old.shape == new.shape:
            parameter.data = old.copy_(new)  # device: both are on the host
        _cast(f"{name}.{key}", parameter, dtype or old.dtype)


def _cast(name: str, parameter: Tensor, dtype: torch.dtype) -> None:
    parameter.data = parameter.data.to(dtype)
    if bool(parameter.data.sum(dtype=torch.float32).isfinite()):  # one pass, no temporary of that size
        return
    why = "the adapter or the base is broken"
    if dtype == torch.float16:
        why = f"that dtype is too narrow (--dtype bfloat16), or {why}"
    stored_as = str(dtype).removeprefix("torch.")
    raise UsageError(f"{name} has values that are not finite when it is merged and stored as {stored_as}: {why}")


def _untie(model: PeftModel) -> None:
    """Give each module that shares a weight one of its own, so that an adapter changes its side only."""
    seen: set[int] = set()
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            seen.add(id(parameter))


def _tie_again(model: PreTrainedModel) -> bool:
    """Whether input and output embeddings, which were tied, are equal still; the configuration says so."""
    embeddings: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    same_shape = embeddings.weight.shape == head.weight.shape
    equal = same_shape and torch.equal(embeddings.weight, head.weight)
    if equal:
        head.weight = embeddings.weight
    else:
        model.all_tied_weights_keys = {}
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = equal
    return equal


# ---- what is written ------------------------------------------------------------------------------------------------


def _origin(adapter: Adapter, base: Base, loaded: _LoadedBase) -> dict[str, Any]:
    """What the manifest says of the adapter and of the base."""
    base_record = None
    if loaded.files is not None:
        base_record = loaded.files.to_json()
    return {
        "adapter_sha256": adapter.files.entries[WEIGHTS_FILE].sha256,
        "method": adapter.method,
        "trained_in_bits": adapter.trained_in_bits,
        "base": base.hub_id or Path(base.name).name,  # no path is published
        "base_files_not_attested": len(loaded.records.unknown),
        "base_files": base_record,
    }


def _write(
    model: PreTrainedModel,
    staging: Path,
    *,
    small_files: Mapping[str, bytes],
    max_shard_size: int | str,
    trained: manifest.Manifest | None,
    origin: Mapping[str, Any],
    leftovers: Leftovers | None,
) -> int:
    """Write the merged model, read it back, and seal it. Returns the bytes of its tensors.

    Args:
        model: the merged model.
        staging: an empty directory.
        small_files: what lies beside the weights, by name.
        max_shard_size: of a weight file.
        trained: the adapter's manifest; None: it has none.
        origin: of the adapter and the base, for the manifest.
        leftovers: tensors of the base's files that are copied as they are.
    """
    model.generation_config = GenerationConfig()  # the base's own file follows, as it is
    model.save_pretrained(staging, max_shard_size=max_shard_size)
    storages = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    nbytes = sum(storages.values())
    copied: Mapping[str, Tensor] | None = None
    if leftovers is not None:
        add_leftovers(staging, leftovers)
        copied = leftovers.tensors
        nbytes += leftovers.nbytes

    differing: list[str] = []
    digests: dict[str, str] = {}  # of the tensors, by "FILE:TENSOR"
    entries: dict[str, FileEntry] = {}  # each is of bytes that were compared
    readbacks = saved_state.compare_model(staging, model, copied=copied)
    for file, readback in readbacks.items():
        differing += readback.differing
        digests |= readback.digests
        if readback.entry is not None:
            entries[file] = readback.entry

    contents = {**small_files, "config.json": model.config.to_json_string(use_diff=True).encode()}
    if len(readbacks) > 1:
        contents[_INDEX_FILE] = _index(digests, nbytes)
    if GENERATION_FILE not in small_files:
        (staging / GENERATION_FILE).unlink(missing_ok=True)
    for name, content in contents.items():
        (staging / name).write_bytes(content)
        entries[name] = FileEntry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    manifest.write(
        staging,
        run_id=trained.run_id if trained else uuid.uuid4().hex,
        step=trained.step if trained else 0,
        status="final",
        files=entries,
        entries=entries,
        tensors=digests,
        extra={"merged": origin},
    )
    differing += map(str, manifest.verify(staging))
    if differing:
        raise CorruptionError(
            f"the merged model was read back wrong: {differing[0]} differs from what was written ({len(differing)} in "
            "all). Nothing was kept: check the disk and the memory, then start the same command again"
        )
    return nbytes


def _index(labels: Iterable[str], nbytes: int) -> bytes:
    """``model.safetensors.index.json``, by the tensors' labels "FILE:TENSOR"."""
    weight_map = {}
    for label in sorted(labels):
        file, _, tensor = label.partition(":")
        weight_map[tensor] = file
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    return (json.dumps(index, indent=2) + "\n").encode()


def _tokenizer_in(directory: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer in a directory; None where there is none."""
    if not vocabulary.has_tokenizer(directory):
        return None
    return vocabulary.tokenizer_in(directory, trust_remote_code=trust_remote_code)


def _small_files(base: Path, adapter: Adapter, config: Any, *, trust_remote_code: bool) -> dict[str, bytes]:
    """The result's files beside its weights, by name: tokenizer, generation settings, processors, code, licences.

    In ``config``, the merged model's configuration, the ids of special tokens that the run changed are set.
    """
    files: dict[str, bytes] = {}
    for path in base.iterdir():
        if path.is_file() and _COPIED_FILES.fullmatch(path.name):
            files[path.name] = path.read_bytes()
    files |= vocabulary.tokenizer_files(base, adapter.directory, trust_remote_code=trust_remote_code)

    base_tokenizer = _tokenizer_in(base, trust_remote_code=trust_remote_code)
    run_tokenizer = _tokenizer_in(adapter.directory, trust_remote_code=trust_remote_code)
    text_config = config.get_text_config()
    if base_tokenizer is not None and run_tokenizer is not None:
        for key, token_id in vocabulary.changed_roles(base_tokenizer, run_tokenizer).items():
            setattr(text_config, key, token_id)

    tokenizer = None  # a reward model writes no text
    if not adapter.is_reward:
        tokenizer = base_tokenizer if run_tokenizer is None else run_tokenizer
    end_tokens = getattr(text_config, "eos_token_id", None)  # not every configuration has one: CPM-Ant's
    generation = vocabulary.generation_file(base, adapter.directory, tokenizer, fallback=end_tokens)
    if generation is not None:
        files[GENERATION_FILE] = generation
    return files


def merged_readme(base_id: str | None, method: str, *, reward: bool = False) -> str:
    """A short ``README.md`` with valid metadata; ``base_id`` is None for a base that is not on the Hub."""
    title, task, auto = "Merged model", "text-generation", "CausalLM"
    if reward:
        title, task, auto = "Merged reward model", "text-classification", "SequenceClassification"
    base = "a local base model"
    metadata: dict[str, Any] = {}
    if base_id:
        base = f"[{base_id}](https://huggingface.co/{base_id})"
        metadata = {"base_model": base_id, "base_model_relation": "finetune"}
    data = ModelCardData(library_name="transformers", pipeline_tag=task, tags=["hf-rocm-tune", "merged"], **metadata)
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {title}\n\n{base}, into which an adapter "
        f"({method}) was merged in float32 by hf-rocm-tune. `integrity.json` has each file's SHA-256 and each tensor's "
        f"digest.\n\n```python\nfrom transformers import AutoModelFor{auto}, AutoTokenizer\n\n"
        f'model = AutoModelFor{auto}.from_pretrained(".")  # this directory, or its id on the Hub\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n'
    )
