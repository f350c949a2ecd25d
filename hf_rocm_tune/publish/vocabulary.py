"""What other programs read of a result beside its weights: tokenizer files, special tokens, end tokens.

transformers 5 writes a tokenizer without SentencePiece's ``tokenizer.model`` and without ``added_tokens_decoder``; the
converter of llama.cpp needs both for Gemma. So the base's own files are kept where the vocabulary is the base's, and
completed with what is new where it is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.foreign import parse_json
from hf_rocm_tune.models.base_files import TOKENIZER_FILE, further_templates
from hf_rocm_tune.models.factory import ModelSource, load_tokenizer
from hf_rocm_tune.models.files import GENERATION_FILE, hub_snapshot
from hf_rocm_tune.paths import expand_user

ROLES = ("bos", "eos", "pad")
"""Special tokens whose ids are in a model's configuration too."""

_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE = re.compile(r"chat_template.*")
_TEMPLATE_FILE = "chat_template.jinja"
# Keys of tokenizer_config.json that name special tokens.
_SPECIAL_KEYS = (
    *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens"),
)
_ANSWER = "The answer."


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has a tokenizer's files."""
    names = ("tokenizer.json", _CONFIG_FILE, "tokenizer.model", "vocab.json")
    return any((directory / name).is_file() for name in names)


def tokenizer_in(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a directory, of a processor that of its text; a ``UsageError`` if it cannot be loaded."""
    loaded: Any = load_tokenizer(ModelSource(name=str(directory), trust_remote_code=trust_remote_code))
    return getattr(loaded, "tokenizer", loaded)


# ---- tokenizer files -------------------------------------------------------------------------------------------------


def tokenizer_files(base: Path, trained: Path, *, trust_remote_code: bool = False) -> dict[str, bytes]:
    """The tokenizer files of a result, by name, from those of its base and those that its run wrote.

    With the base's vocabulary and special tokens these are the base's files as they are, with one that extends it the
    base's files and what is new, with any other the run's. The chat template is the run's.
    """
    if not has_tokenizer(trained):
        template = trained / _TEMPLATE_FILE
        given = template.read_text(encoding="utf-8") if template.is_file() else None
        return _files(base) if given is None else _with_template(_files(base), _files(trained), given)
    if not has_tokenizer(base):
        return _completed(_files(trained), tokenizer_in(trained, trust_remote_code=trust_remote_code))
    before = tokenizer_in(base, trust_remote_code=trust_remote_code)
    after = tokenizer_in(trained, trust_remote_code=trust_remote_code)
    if _vocabulary(before) == _vocabulary(after) and before.special_tokens_map == after.special_tokens_map:
        files = _with_settings(_files(base), _files(trained), after)
    elif before.get_vocab().items() <= after.get_vocab().items():
        files = _extended(_files(base), _files(trained), after)
    else:
        files = _completed(_files(trained), after)
    if "tokenizer.model" in files and not _json(files.get(_CONFIG_FILE)).get("added_tokens_decoder"):
        files = _completed(files, after)  # a base that transformers 5 wrote, or its tokenizer.model alone
    # An earlier version read adapters without the folder of further templates, and saved the default one alone.
    if after.chat_template not in (before.chat_template, _default_of(before.chat_template)):
        files = _with_template(files, _files(trained), after.chat_template)
    return files


def _files(directory: Path) -> dict[str, bytes]:
    """Tokenizer files by name; chat templates in a folder of their own stand in ``tokenizer_config.json``."""
    files = {}
    for path in sorted(directory.iterdir()):
        if path.is_file() and TOKENIZER_FILE.fullmatch(path.name):
            files[path.name] = path.read_bytes()
    if _TEMPLATE_FILE not in files:
        return files
    config = _json(files.get(_CONFIG_FILE))
    others = [directory / name for name in further_templates(directory)]
    if others:
        templates = {"default": files.pop(_TEMPLATE_FILE).decode()}
        for path in others:
            templates[path.name.removesuffix(".jinja")] = path.read_text(encoding="utf-8")
        config["chat_template"] = _by_name(templates)
        files[_CONFIG_FILE] = _as_json(config)
    elif "chat_template" in config:
        # transformers reads the file alone, llama.cpp's converter the settings alone: the result has one template.
        del config["chat_template"]
        files[_CONFIG_FILE] = _as_json(config)
    return files


def _by_name(templates: Mapping[str, str]) -> list[dict[str, str]]:
    """Several templates as ``tokenizer_config.json`` holds them."""
    return [{"name": name, "template": template} for name, template in templates.items()]


def _default_of(templates: Any) -> Any:
    return templates.get("default") if isinstance(templates, Mapping) else templates


def _vocabulary(tokenizer: Any) -> Any:
    """Everything that decides which text becomes which tokens, in a form that can be compared."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    content = json.loads(backend.to_str())
    return {key: value for key, value in content.items() if key not in ("truncation", "padding")}


def _extended(base: Mapping[str, bytes], trained: Mapping[str, bytes], tokenizer: Any) -> dict[str, bytes]:
    """The base's files with new tokens or other special tokens."""
    files = dict(base)
    for name in ("tokenizer.json", "added_tokens.json"):
        if name in trained:
            files[name] = trained[name]
    config = _json(base.get(_CONFIG_FILE))
    given = _json(trained.get(_CONFIG_FILE))
    for key in _SPECIAL_KEYS:
        if key in given:
            config[key] = given[key]
        else:
            config.pop(key, None)
    files[_CONFIG_FILE] = _as_json(config)
    if "special_tokens_map.json" in files:
        files["special_tokens_map.json"] = _as_json(dict(tokenizer.special_tokens_map))
    return _completed(files, tokenizer)


def _with_settings(base: Mapping[str, bytes], trained: Mapping[str, bytes], tokenizer: Any) -> dict[str, bytes]:
    """The base's files, with the run's ``tokenizer_config.json`` where the base has none.

    llama.cpp's converter reads special tokens and the chat template of nothing without that file.
    """
    if _CONFIG_FILE in base or _CONFIG_FILE not in trained:
        return dict(base)
    return _completed({**base, _CONFIG_FILE: trained[_CONFIG_FILE]}, tokenizer)


def _completed(files: Mapping[str, bytes], tokenizer: Any) -> dict[str, bytes]:
    """With every added token in ``tokenizer_config.json``, and in ``added_tokens.json`` where there is one."""
    config = _json(files.get(_CONFIG_FILE))
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    decoder = {}
    for number, token in sorted(tokenizer.added_tokens_decoder.items()):
        decoder[str(number)] = {field: getattr(token, field) for field in fields}
    config["added_tokens_decoder"] = decoder
    done = {**files, _CONFIG_FILE: _as_json(config)}
    if "added_tokens.json" in files:
        done["added_tokens.json"] = _as_json(_json(files["added_tokens.json"]) | tokenizer.get_added_vocab())
    return done


def _with_template(files: Mapping[str, bytes], trained: Mapping[str, bytes], template: Any) -> dict[str, bytes]:
    """With the run's chat template in place of any other."""
    done = {name: content for name, content in files.items() if not _TEMPLATE.fullmatch(name)}
    config = _json(done.get(_CONFIG_FILE))
    if config.pop("chat_template", None) is not None:
        done[_CONFIG_FILE] = _as_json(config)
    done |= {name: content for name, content in trained.items() if _TEMPLATE.fullmatch(name)}
    if isinstance(template, str):
        done[_TEMPLATE_FILE] = template.encode()
    elif template is not None:
        config = _json(done.get(_CONFIG_FILE))
        config["chat_template"] = _by_name(template)
        done[_CONFIG_FILE] = _as_json(config)
    return done


def _json(content: bytes | None, what: str = "a file of the tokenizer") -> dict[str, Any]:
    try:
        parsed = parse_json(content or b"{}")
    except ValueError as error:
        raise UsageError(f"{what} is no JSON that is used ({error}): copy it again") from error
    return parsed if isinstance(parsed, dict) else {}


def _as_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def tokenizer_directory(source: ModelSource) -> Path | None:
    """The directory with a model's tokenizer files, downloaded where the Hub answers; None where they are not here."""
    if source.is_local:
        return expand_user(source.name)
    wanted = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"]
    try:
        return Path(snapshot_download(source.name, revision=source.revision, allow_patterns=wanted))
    except (OSError, HfHubHTTPError, HFValidationError):
        return hub_snapshot(source.name, source.revision)


# ---- special tokens and ends -----------------------------------------------------------------------------------------


def changed_roles(before: Any, after: Any) -> dict[str, int]:
    """``eos_token_id`` and the like of a configuration, where a run's tokenizer has others than its base's."""
    changed = {}
    for role in ROLES:
        key = f"{role}_token_id"
        value = getattr(after, key)
        if value is not None and value != getattr(before, key):
            changed[key] = value
    return changed


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that the chat template writes after an answer; None without a template, or if it writes none."""
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError):
        return None
    after = rendered.rpartition(_ANSWER)[2].lstrip()
    ends = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    written = [content for content in ends if content and after.startswith(content)]
    return ends[max(written, key=len)] if written else None


def end_tokens(known: int | list[int] | None, tokenizer: Any) -> list[int]:
    """Ids of all tokens that end an answer: those known, the tokenizer's eos, and the end of the template's turn."""
    every = [*end_tokens_of(known), tokenizer.eos_token_id, end_of_turn(tokenizer)]
    return [number for number in dict.fromkeys(every) if number is not None]


def generation_file(base: Path, trained: Path, tokenizer: Any, *, fallback: int | list[int] | None) -> bytes | None:
    """``generation_config.json`` of a result: the run's, or the base's, with the end tokens that the run trained.

    ``tokenizer`` is the result's, None for a model that writes no text; ``fallback`` are the end tokens in
    ``config.json``, for a base without the file. None: the base has no such file and needs none.
    """
    file = next((place / GENERATION_FILE for place in (trained, base) if (place / GENERATION_FILE).is_file()), None)
    content = file.read_bytes() if file else None
    if tokenizer is None:
        return content
    config = _json(content, GENERATION_FILE)
    known = config.get("eos_token_id", fallback)
    ends = end_tokens(known, tokenizer)
    if set(ends) <= set(end_tokens_of(known)):
        return content
    return _as_json(config | {"eos_token_id": ends})


def end_tokens_of(known: int | list[int] | None) -> list[int]:
    """The end tokens of a configuration, as a list."""
    if known is None:
        return []
    return list(known) if isinstance(known, list) else [known]
