"""Loads a model onto its device, verified, and its tokenizer, from a Hub id or a directory."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import FOREIGN_ERRORS, UsageError, device_shortage, first_line
from hf_rocm_tune.foreign import check_counts, check_value, limit_templates, visible
from hf_rocm_tune.machine import torchvision
from hf_rocm_tune.models.experts import has_experts, use_packed
from hf_rocm_tune.models.file_comparison import record_file_digests, record_host_tensors
from hf_rocm_tune.models.files import (
    FileRecords,
    check_beside,
    check_files,
    check_hub_settings,
    check_model_directory,
    hub_snapshot,
)
from hf_rocm_tune.models.incomplete import describe
from hf_rocm_tune.models.loading import LoadReport, leaving_layers, packed_experts
from hf_rocm_tune.models.placement import mark_computed_in_load, place
from hf_rocm_tune.models.quantised import (
    checkpoint_bits,
    has_mxfp4,
    keep_trainable_on_cpu,
    require_bitsandbytes,
    require_quantised,
    require_right_on_cpu,
)
from hf_rocm_tune.models.split import device_map, set_device_map, without_dispatch
from hf_rocm_tune.models.streamed import Streamed
from hf_rocm_tune.models.streaming import Streamer
from hf_rocm_tune.paths import HUB_FIX, answers, expand_user, is_local_model, require_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

    from hf_rocm_tune.transfer import Mover


@dataclass(frozen=True)
class ModelSource:
    name: str  # Hub id or local directory
    revision: str = "main"  # branch, tag or commit of a Hub id
    trust_remote_code: bool = False
    reward: bool = False  # as a reward model: a single output, whose head may be new
    init: dict[str, Any] = field(default_factory=dict)  # for ``from_pretrained`` (dtype, attn_implementation ...)
    quantization: BitsAndBytesConfig | None = None
    packed: bool = True  # experts that are in MXFP4 in the files stay so; else they become those of a plain model

    @property
    def is_local(self) -> bool:
        return is_local_model(self.name)


def check_source(source: ModelSource, device: torch.device) -> PreTrainedConfig:
    """Checks files, configuration and bitsandbytes before anything is loaded; returns the configuration."""
    require_model(source.name)
    if source.is_local:
        check_model_directory(expand_user(source.name))
    config = read_config(source)
    bits = checkpoint_bits(config, source.name, on_card=device.type != "cpu")
    if has_mxfp4(config):
        if source.quantization is not None:
            raise UsageError(
                f"model {source.name}: its experts are in 4 bit in its files (MXFP4) and stay so, its other weights "
                "stay in 16: drop --load_in_4bit or --load_in_8bit"
            )
    elif source.quantization is not None:
        flag = "--load_in_8bit"
        if source.quantization.load_in_4bit:
            flag = "--load_in_4bit"
        require_bitsandbytes(device, flag)
    elif bits:
        require_bitsandbytes(device, f"model {source.name}, {bits}-bit in its files,")
    return config


def require_writer(name: str, config: PreTrainedConfig) -> None:
    """Refuses a model that does not write text from left to right: encoders, classifiers, encoder-decoders."""
    first = config.architectures[0]
    model_class = getattr(transformers, first, None)  # None: of the model's own code
    if first.endswith("ForSequenceClassification"):
        raise UsageError(
            f"model {name}: {first} gives a number and writes no text: train it with `reward`, or give the model that "
            "it was made from"
        )
    writes = model_class is None or not hasattr(model_class, "can_generate") or model_class.can_generate()
    what = ""
    if config.is_encoder_decoder:
        what = "has an encoder and a decoder"
    elif not writes:
        what = "writes no text"
    if what:
        raise UsageError(
            f"model {name}: {first} {what}: give a causal language model, such as ...ForCausalLM in its config.json"
        )


def read_config(source: ModelSource) -> PreTrainedConfig:
    name, path = source.name, expand_user(source.name)
    if source.is_local and not os.path.isfile(path / "config.json"):
        raise UsageError(f"model: {name} has no config.json: give a model directory or a Hub id")
    fix = "download or copy it again" if source.is_local else HUB_FIX
    how = {"revision": source.revision, "trust_remote_code": source.trust_remote_code}
    try:
        where = str(path) if source.is_local else name
        offline = not source.is_local and (constants.HF_HUB_OFFLINE or not answers(constants.ENDPOINT))
        content = PreTrainedConfig.get_config_dict(where, local_files_only=offline, **how)[0]
        check_value(content)
        check_counts(content)
        config: PreTrainedConfig = AutoConfig.from_pretrained(where, local_files_only=offline, **how)
    except StrictDataclassError as error:  # its first line does not say what was expected
        raise UsageError(f"model {name}: config.json: {error}; {fix}") from error
    except (*FOREIGN_ERRORS, OSError) as error:
        if "trust_remote_code" in str(error) and not source.trust_remote_code:
            raise UsageError(
                f"model {name} has code of its own, which runs with your rights: read it, then give --trust_remote_code"
            ) from error
        why = describe(None, error, otherwise=fix)
        raise UsageError(f"model {name}: its configuration cannot be read: {why}") from error
    _require_architecture(name, config)
    return config


def _require_architecture(name: str, config: PreTrainedConfig) -> None:
    named, first = config.architectures, None
    if isinstance(named, list) and named:
        first = named[0]
    if not first or not isinstance(first, str):
        raise UsageError(f"model {name}: its config.json names no architecture: give a causal language model")
    model_class = getattr(transformers, first, transformers.PreTrainedModel)  # else of the model's own code
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not is_model and not first.startswith("AutoModel"):
        raise UsageError(
            f"model {name}: its config.json names {first}, which is no architecture: download or copy it again"
        )


def load_model(
    source: ModelSource, mover: Mover, *, on_host: bool = False, streamed: Streamed | None = None
) -> tuple[PreTrainedModel, float]:
    """Loads a model onto the mover's device or cards, every tensor verified; returns it and the seconds that it took.

    Args:
        source: the model.
        mover: moves and verifies its tensors, and keeps what is known of their files.
        on_host: leave it on the host.
        streamed: the layers that stay on the host and visit the device.

    Raises:
        UsageError: the model cannot be loaded; one line says why and what to do.
    """
    started = time.perf_counter()
    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(_show_plainly)  # adding it again changes nothing
    config = read_config(source)
    arguments = _load_arguments(source, mover, config, on_host=on_host, streamed=streamed)

    with _errors_in_a_line(source, config):
        model, loading_info = _load_verified(source, mover, config, arguments, on_host=on_host, streamed=streamed)
    require_quantised(model, source.name)

    if has_mxfp4(config):
        _forget_blocks(model)
    use_packed(model)
    if on_host:
        record_host_tensors(model, mover)
    else:
        _place_loaded(model, mover, streamed)
        require_right_on_cpu(model, source.name)
        mark_computed_in_load(model, mover)
        keep_trainable_on_cpu(model)
    record_file_digests(model, loading_info["unexpected_keys"], mover)
    return model, time.perf_counter() - started


def _load_verified(
    source: ModelSource,
    mover: Mover,
    config: PreTrainedConfig,
    arguments: dict[str, Any],
    *,
    on_host: bool,
    streamed: Streamed | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model as ``from_pretrained`` makes it, every copy verified, and its loading info; no weight is missing."""
    from trl.trainer.reward_trainer import suppress_seqcls_warning
    from trl.trainer.utils import create_model_from_path

    four_bit = source.quantization is not None and source.quantization.load_in_4bit
    on_cpu = all(str(device) == "cpu" for device in arguments["device_map"].values())
    report = LoadReport(mover)
    contexts: list[AbstractContextManager[Any]] = [
        packed_experts(
            mover,
            nf4=four_bit and has_experts(config),
            mxfp4=has_mxfp4(config) and source.packed and not on_host,
            cast=source.quantization is not None,
            narrow=four_bit and on_cpu,
            report=report,
        )
    ]
    if streamed is not None:
        contexts.append(leaving_layers(mover, streamed))
    if len(set(arguments["device_map"].values())) > 1:
        contexts.append(without_dispatch())
    model_class = None  # TRL's choice
    if source.reward:
        model_class = AutoModelForSequenceClassification
        contexts.append(suppress_seqcls_warning())
    contexts += [mover.copies_as("weights"), report.reading()]

    # Tensors of another size are refused by `_require_complete`, which names them, unless a new head is wanted.
    resizes = bool(arguments.get("ignore_mismatched_sizes"))
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        model, loading_info = create_model_from_path(
            source.name, model_class, output_loading_info=True, **{**arguments, "ignore_mismatched_sizes": True}
        )
        _require_complete(source, loading_info, resizes=resizes)
    return model, loading_info


@contextmanager
def _errors_in_a_line(source: ModelSource, config: PreTrainedConfig) -> Iterator[None]:
    """Within the block an error that is of the model's files or configuration is one line."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:  # ImportError: attn_implementation
        raise UsageError(f"model {source.name}: {first_line(error)}") from error
    except (*FOREIGN_ERRORS, pickle.UnpicklingError) as error:
        if _is_of_pickles(error):
            raise UsageError(
                f"model {source.name}: a pytorch_model.bin is damaged, or holds more than tensors, which is not run "
                f"({first_line(error)}): download or copy it again, or give weights in safetensors"
            ) from error
        if not _is_of_modelling(error):
            raise
        why = describe(config, error, otherwise="download or copy it again")
        raise UsageError(
            f"model {source.name}: its configuration describes no model that can be loaded: {why}"
        ) from error


def _place_loaded(model: PreTrainedModel, mover: Mover, streamed: Streamed | None) -> None:
    """Have every tensor on its device; layers that are streamed stay where they are."""
    set_device_map(model, mover)
    if streamed is not None:
        record_host_tensors(model, mover)  # before the streamer replaces the layers' tensors
        Streamer(model, streamed, mover)
    place(model, mover, loaded=True)


def _load_arguments(
    source: ModelSource, mover: Mover, config: PreTrainedConfig, *, on_host: bool, streamed: Streamed | None
) -> dict[str, Any]:
    """What ``from_pretrained`` is told, all of it public."""
    arguments = {"revision": source.revision, "trust_remote_code": source.trust_remote_code, **source.init}
    if source.quantization is not None:
        arguments["quantization_config"] = source.quantization
    # TRL's default, "auto", would split a model over two visible cards by peer copies.
    if on_host:
        arguments["device_map"] = {"": torch.device("cpu")}
    else:
        arguments["device_map"] = device_map(mover)
    if streamed is not None and streamed.from_files:
        layers = {f"{streamed.stack}.{layer}": torch.device("cpu") for layer in streamed.layers}
        arguments["device_map"] = {**arguments["device_map"], **layers}
    if source.reward:
        arguments["num_labels"] = 1
    if has_mxfp4(config):  # transformers' other way needs kernels that are no torch operators, and do not train
        arguments["quantization_config"] = Mxfp4Config(dequantize=True)
        logging.getLogger("transformers.quantizers.quantizer_mxfp4").setLevel(logging.ERROR)  # of those kernels
    return arguments


def _forget_blocks(model: PreTrainedModel) -> None:
    """Let transformers before 5.24 save what was made of gpt-oss's blocks under its own names, not the blocks'."""
    conversions: Any = upstream.read("weight_conversions", model)
    if conversions is not None:
        kept = [conversion for conversion in conversions if not str(conversion.source_patterns[0]).endswith("_blocks")]
        upstream.assign("weight_conversions", model, kept)


def _require_complete(source: ModelSource, info: Mapping[str, Any], *, resizes: bool) -> None:
    """Refuse weight files whose tensors have other shapes than the model, or that lack some."""
    rows = sorted(info["mismatched_keys"])
    if rows and not resizes:
        name, in_file, expected = rows[0]
        raise UsageError(
            f"model: {len(rows)} tensors have other shapes in the weight files than config.json says, {name} first "
            f"({list(in_file)} instead of {list(expected)}): use the config.json that belongs to these weights"
        )
    missing = sorted(info["missing_keys"])
    if source.reward:
        missing = [key for key in missing if key != "score.weight"]
    if missing:
        raise UsageError(
            f"model {source.name}: its weight files lack {len(missing)} tensors, {missing[0]} first, which would be "
            "initialised at random: download or copy it again, or give the model that this configuration belongs to"
        )


_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def _show_plainly(record: logging.LogRecord) -> bool:
    """Names of a pickle's tensors in a log record do not act on the terminal; colours of transformers' do."""
    parts = _COLOUR.split(record.getMessage())  # text and colours in turn
    parts[::2] = [visible(text) for text in parts[::2]]
    record.msg = "".join(parts)
    record.args = ()
    return True


def _is_of_modelling(error: Exception) -> bool:
    """Whether an error was raised while a model was made by its own code, not while ours placed its weights."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    inside = names[max(at for at, name in enumerate(names) if name == __name__) + 1 :]
    return device_shortage(error) is None and not any(name.startswith("hf_rocm_tune.") for name in inside)


def _is_of_pickles(error: Exception) -> bool:
    """Whether torch could not read a file of weights that is a pickle."""
    return isinstance(error, pickle.UnpicklingError) or "PytorchStreamReader" in str(error)


def _directory_of(source: ModelSource) -> Path | None:
    """Where a model's files are; None for one of the Hub that is not in the cache."""
    if source.is_local:
        return expand_user(source.name)
    return hub_snapshot(source.name, source.revision)


def attest_files(source: ModelSource, mover: Mover) -> FileRecords:
    """Compare what was loaded with a second reading of the model's files, and these with recorded SHA-256."""
    directory, files = _directory_of(source), set[Path]()
    if directory is not None:
        files = set(directory.glob("*.safetensors"))
    seen = {file.resolve() for file in files}
    files |= {Path(path) for path, _ in mover.loaded if Path(path).resolve() not in seen}
    return check_files(sorted(files), Path(constants.HF_HOME) / "hf_rocm_tune" / "attested_files.json", mover.loaded)


def is_pickled(source: ModelSource) -> bool:
    """Whether a model that has been loaded has its weights as pickles only (``pytorch_model.bin``)."""
    directory = _directory_of(source)
    if directory is None or any(directory.glob("*.safetensors")):
        return False
    return any(directory.glob("pytorch_model*.bin"))


def load_tokenizer(source: ModelSource, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer or processor; a model's template of ``--chat_template_path`` is left to TRL."""
    template = None
    if chat_template is not None:
        template = read_chat_template(chat_template, source.trust_remote_code)
    check_tokenizer_files(source.name, source.revision)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoProcessor.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except ImportError as error:
        raise UsageError(f"the processor of {source.name} {_needs(error)}") from error
    except (*FOREIGN_ERRORS, OSError) as error:
        raise UsageError(
            f"tokenizer of {source.name}: {first_line(error)}; the model directory needs tokenizer.json and "
            "tokenizer_config.json"
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    for loaded in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        # Where it was loaded from: transformers saves that path into tokenizer_config.json, for a base that has
        # tokenizer.model and no tokenizer.json, and `check_beside` refuses results that name files elsewhere.
        getattr(loaded, "init_kwargs", {}).pop("vocab_file", None)
    return tokenizer


def check_tokenizer_files(name: str, revision: str | None = None) -> None:
    """Checks what a tokenizer or processor is made from, and limits its chat template, before it is loaded."""
    limit_templates()
    if is_local_model(name):
        check_beside(expand_user(name))
    else:
        check_hub_settings(name, revision)


def stop_ids(source: ModelSource) -> set[int]:
    """Ids of the tokens at which the model stops to generate, by its generation configuration or its configuration."""
    try:
        ends = GenerationConfig.from_pretrained(source.name, revision=source.revision).eos_token_id
    except OSError:  # it has none
        ends = getattr(read_config(source).get_text_config(), "eos_token_id", None)
    if isinstance(ends, int):
        return {ends}
    return set(ends or ())


def _needs(error: ImportError) -> str:
    """Which library a processor of pictures lacks, and how to get it."""
    text = str(error).lower()
    if "torchvision" in text:
        return f"needs torchvision: {torchvision.install(metadata.version('torch'))}"
    for library in ("num2words", "pillow"):
        if library in text:
            return f"needs {library}: `pip install {library}`"
    return f"cannot be loaded: {first_line(error)}"


FLAG = "--chat_template_path"
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def named_templates() -> dict[str, Path | None]:
    """The chat templates that have a name: TRL's, as files, and ``chatml``."""
    import trl

    templates: dict[str, Path | None] = {"chatml": None}
    for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        if not file.stem.endswith("_training"):
            templates[file.stem] = file
    return templates


def tokens_for(template: str, tokens: list[str], end: str | None) -> str:
    """Writes a tokenizer of nothing but these tokens, with a chat template, to a directory for this process's life.

    ``end``: the one of them that ends an answer; TRL makes it the end-of-sequence token.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    directory = tempfile.mkdtemp(prefix="hf-rocm-tune-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    inner = Tokenizer(WordLevel({tokens[0]: 0}, unk_token=tokens[0]))
    made = PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=tokens, eos_token=end)
    made.chat_template = template
    made.save_pretrained(directory)
    return directory


def read_chat_template(path: str, trust_remote_code: bool = False) -> str | None:
    """The text of a chat template: of a file (``.jinja``, ``.j2``) or of one that has a name; None: of a model."""
    named = named_templates()
    if path.endswith((".jinja", ".j2")):
        return _read_template(Path(path))
    if path in named and not os.path.exists(path):
        file = named[path]
        if file is None:
            return _CHATML
        return _read_template(file)
    check_tokenizer_files(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{FLAG} {path}: no tokenizer can be loaded from there: give a file that ends in .jinja, a model whose "
            f"template to take, or one of {', '.join(named)}"
        ) from error
    if not tokenizer.chat_template:
        raise UsageError(f"{FLAG} {path}: the tokenizer there has no chat template either: give a .jinja file")
    return None


def _read_template(file: Path) -> str:
    if not os.path.isfile(file):
        raise UsageError(f"{FLAG}: {file} does not exist: give a file that ends in .jinja, or a model")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{FLAG}: {file} cannot be read as text ({error}): give a Jinja template") from error
    if text.startswith("\ufeff"):
        raise UsageError(
            f"{FLAG}: {file} begins with a byte order mark, which would stand before each conversation: save it as "
            "UTF-8 without one"
        )
    if not text.strip():
        raise UsageError(f"{FLAG}: {file} is empty: give a Jinja template")
    return text
