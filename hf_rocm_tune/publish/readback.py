"""What a GGUF file says beside its weights, compared with the model that was converted: vocabulary, template, settings.

Compared are each token's text and type, SentencePiece's scores, merges, special tokens, the chat template, sizes, rope
settings and the layers that attend to a window. A difference is named and the file is not kept: with a wrong token type
llama.cpp reads ``<start_of_turn>`` as eleven letters and says nothing.

Not compared: ``tokenizer.ggml.pre``, the name of the rule by which llama.cpp splits text. The converter takes it from
the tokens of one sentence. Where llama.cpp sets other spaces before words than the tokenizer, that is said and the file
is kept: see `other_spaces`.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_rocm_tune.errors import CorruptionError, UsageError, listed

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # gguf.TokenType
_TYPE_NAMES = dict(enumerate(("normal", "unknown", "control", "user defined", "unused", "byte"), start=1))
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "▁"
_TEMPLATE_KEY = "tokenizer.chat_template"
_NO_FILE = "no GGUF file can be made of it. Serve the merged directory with transformers or vLLM"
_NORMALISED = "expert_weights_norm"
_TOOLS = "tool_use"  # the name of the template for requests with tools, in transformers and llama.cpp
_LETTERS = frozenset(string.ascii_letters + string.digits)
# Every n-th layer attends to all tokens in llama.cpp, the others to a window; for files that do not say which.
_ASSUMED_PERIOD = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "exaone4": 4, "olmo2": 4}
# Whether llama.cpp divides the weights of the chosen experts by their sum; for mixtures whose files do not say it.
_ASSUMED_NORMALISED = {"qwen2moe": False, "olmoe": False} | dict.fromkeys(("qwen3moe", "qwen3next", "lfm2moe"), True)
# Tokens at which llama.cpp stops because of their text (`llama_vocab::impl::load`).
_ENDS_BY_TEXT = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<end_of_turn>"),
        *("<|eom_id|>", "<|end_of_text|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "<|EOT|>"),
    }
)
# By the last part of a key: the name of its value in ``config.json``.
_SIZES = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "embedding_length": ("hidden_size", "n_embd"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
}
_ROLES = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}  # in GGUF, in a tokenizer


class Model(NamedTuple):
    """The model that was converted."""

    tokenizer: Any
    config: Any  # of its text part
    ends: Sequence[int]  # ids of all tokens that end an answer
    directory: Path


def model_in(directory: Path, *, trust_remote_code: bool = False) -> Model:
    """Read what a file is compared with; a ``UsageError`` if that cannot be loaded."""
    from hf_rocm_tune.models.factory import ModelSource, read_config
    from hf_rocm_tune.models.files import GENERATION_FILE
    from hf_rocm_tune.publish import vocabulary

    tokenizer = vocabulary.tokenizer_in(directory, trust_remote_code=trust_remote_code)
    config = read_config(ModelSource(name=str(directory), trust_remote_code=trust_remote_code)).get_text_config()
    known = config.eos_token_id
    file = directory / GENERATION_FILE
    if file.is_file():
        known = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id", known)
    return Model(tokenizer, config, vocabulary.end_tokens(known, tokenizer), directory)


def fields_of(file: Path) -> dict[str, Any]:
    """Every entry of a GGUF file, by key."""
    gguf: Any = importlib.import_module("gguf")
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def check(fields: Mapping[str, Any], model: Model, tensors: Mapping[str, Any]) -> str:
    """Compare a file with the model, a ``CorruptionError`` if they differ; gives what was compared, for the user.

    ``tensors`` gives the values of each tensor of the file, by name. A ``UsageError`` for a model that llama.cpp would
    compute otherwise than it was trained.
    """
    for otherwise in (_other_layers(fields, model), _other_routing(fields, model)):
        if otherwise is not None:
            raise UsageError(otherwise)
    wrong = differences(fields, model, tensors)
    if wrong:
        raise CorruptionError(
            f"the GGUF file differs from the merged model: {'; '.join(wrong[:3])} ({len(wrong)} in all): llama.cpp "
            "would read other text than was trained, so the file is not kept; --llama_cpp may name a newer llama.cpp"
        )
    words = "vocabulary, special tokens, chat template and settings"
    tokens = len(fields.get("tokenizer.ggml.tokens", ()))
    text = f"GGUF read back: {words} are the merged model's ({tokens} tokens)"
    others = sorted(set(_templates_of(model.tokenizer)) - {"default"})
    if others:
        text += f". It has the chat templates default and {', '.join(others)}; llama.cpp uses {_used_of(others)}"
    return text


def _used_of(others: Sequence[str]) -> str:
    """Which of several templates llama.cpp uses: it asks for ``tool_use`` alone (``common_chat_templates_init``)."""
    if _TOOLS in others:
        return f"{_TOOLS} for requests with tools, default for all others"
    return "default alone"


def differences(fields: Mapping[str, Any], model: Model, tensors: Mapping[str, Any]) -> list[str]:
    """What a file says otherwise than the model, in words; empty if nothing."""
    return [
        *_tokens(fields, model),
        *_merges(fields, model),
        *_special_tokens(fields, model),
        *_template(fields, model),
        *_settings(fields, model),
        *_rope(fields, model, tensors),
    ]


def ends_to_add(fields: Mapping[str, Any], model: Model) -> dict[str, int]:
    """End tokens that llama.cpp would not stop at, by the role in which the file can name them: ``eot``, ``eom``."""
    tokens = fields.get("tokenizer.ggml.tokens", ())
    named = {fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")}
    missing = []
    for end in model.ends:
        if end not in named and end < len(tokens) and tokens[end] not in _ENDS_BY_TEXT:
            missing.append(end)
    free = [role for role in ("eot", "eom") if f"tokenizer.ggml.{role}_token_id" not in fields]
    return dict(zip(free, missing, strict=False))


def adds_bos(fields: Mapping[str, Any]) -> bool | None:
    """Whether llama.cpp puts the bos token before a text; None where that is its own choice."""
    stated = fields.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    kind = fields.get("tokenizer.ggml.model")
    rule = fields.get("tokenizer.ggml.pre")
    if kind == "llama" or rule in ("llama3", "llama-bpe", "llama-v3"):
        return True
    return None


# ---- the vocabulary --------------------------------------------------------------------------------------------------


def _tokens(fields: Mapping[str, Any], model: Model) -> Iterator[str]:
    tokenizer = model.tokenizer
    texts = fields.get("tokenizer.ggml.tokens", [])
    types = fields.get("tokenizer.ggml.token_type", [])
    scores = fields.get("tokenizer.ggml.scores", [])
    wanted_scores = _piece_scores(model.directory)
    is_pieces = fields.get("tokenizer.ggml.model") == "llama"
    vocabulary = {number: text for text, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    lost = [number for number in vocabulary if number >= len(texts)]
    if lost:
        yield f"token {lost[0]} ({vocabulary[lost[0]]!r}) is not in it"
    for number, text in enumerate(texts):
        kind = types[number] if number < len(types) else _NORMAL
        named = f"token {number} ({vocabulary.get(number, text)!r})"
        if number not in vocabulary:
            if kind != _UNUSED:
                yield f"{named} is in no tokenizer file and is {_TYPE_NAMES.get(kind, kind)}"
            continue
        if number == tokenizer.mask_token_id and kind in (_UNUSED, _NORMAL):  # no text to be continued has it
            continue
        if text not in _spellings(tokenizer, vocabulary[number], added.get(number)):
            yield f"{named} is {text!r} there"
        allowed = _allowed_types(vocabulary[number], added.get(number), tokenizer.unk_token, is_pieces=is_pieces)
        if kind not in allowed:
            meant = " or ".join(_TYPE_NAMES[type_] for type_ in sorted(allowed))
            yield f"{named} has the type {_TYPE_NAMES.get(kind, kind)} there, not {meant}"
        if is_pieces and number not in added:
            score = wanted_scores.get(vocabulary[number])
            there = scores[number] if number < len(scores) else math.nan
            if score is not None and not math.isclose(score, there, rel_tol=1e-6, abs_tol=1e-6):
                yield f"{named} has the score {there:g} there, not {score:g}"


def _spellings(tokenizer: Any, text: str, added: Any) -> set[str]:
    """The forms of a token's text that the converter may write."""
    if added is None:
        return {text}
    forms = {text, text.replace(_SPACE, " ")}
    if not added.normalized:
        forms.add(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)))
    return forms


def _allowed_types(text: str, added: Any, unknown: str | None, *, is_pieces: bool) -> set[int]:
    if added is not None:
        allowed = {_CONTROL}
        if not added.special:  # it is a control token in GGUF if it looks like one: <|start|>
            allowed.add(_USER_DEFINED)
    elif is_pieces and _BYTE_PIECE.fullmatch(text):
        return {_BYTE}
    else:
        allowed = {_NORMAL, _UNUSED}
    if text == unknown:
        allowed.add(_UNKNOWN)
    return allowed


def _piece_scores(directory: Path) -> dict[str, float]:
    """The scores of SentencePiece's pieces, by text; empty without ``tokenizer.model`` or that library."""
    file = directory / "tokenizer.model"
    if not file.is_file():
        return {}
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        return {}
    pieces = SentencePieceProcessor()
    try:
        pieces.LoadFromFile(str(file))
    except RuntimeError:
        return {}  # of another library, such as Mistral's
    return {pieces.IdToPiece(number): pieces.GetScore(number) for number in range(pieces.GetPieceSize())}


def _merges(fields: Mapping[str, Any], model: Model) -> Iterator[str]:
    there = fields.get("tokenizer.ggml.merges")
    file = model.directory / "tokenizer.json"
    if there is None or not file.is_file():
        return
    given = json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("merges") or []
    wanted = []
    for merge in given:
        if not isinstance(merge, str):  # a pair
            merge = " ".join(part.replace(" ", "Ġ") for part in merge)
        wanted.append(merge)
    if len(wanted) != len(there):
        yield f"it has {len(there)} merges, not {len(wanted)}"
        return
    for number, merge in enumerate(wanted):
        if merge != there[number]:
            yield f"merge {number} is {there[number]!r} there, not {merge!r}"
            return


def _special_tokens(fields: Mapping[str, Any], model: Model) -> Iterator[str]:
    tokenizer = model.tokenizer
    named = {fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")}
    for theirs, ours in _ROLES.items():
        there = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        wanted = getattr(tokenizer, f"{ours}_token_id")
        configured = getattr(model.config, f"{ours}_token_id", None)
        in_config = configured if isinstance(configured, list) else [configured]
        if there is not None and there != wanted and there not in in_config:
            yield f"its {ours} token is {there}, not {wanted}"
        if ours == "eos" and wanted is not None and wanted not in named:
            yield f"{wanted} ({tokenizer.eos_token!r}) ends an answer and is no end token there"
    texts = fields.get("tokenizer.ggml.tokens", ())
    for end in model.ends:
        if end not in named and end < len(texts) and texts[end] not in _ENDS_BY_TEXT and end != tokenizer.eos_token_id:
            yield f"{end} ({texts[end]!r}) ends an answer and is no end token there"
    adds = adds_bos(fields)
    bos = tokenizer.bos_token_id
    if adds is not None and bos is not None:
        adds_ours = tokenizer("a")["input_ids"][:1] == [bos]
        if adds != adds_ours:
            verb = "puts" if adds else "does not put"
            yield f"it {verb} the bos token before a text, unlike the tokenizer"


def _templates_of(tokenizer: Any) -> dict[str, str]:
    """The chat templates of a tokenizer by name; a single one is ``default``."""
    given = tokenizer.chat_template
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"default": given}


def _template(fields: Mapping[str, Any], model: Model) -> Iterator[str]:
    wanted = _templates_of(model.tokenizer)
    yield from _one_template("chat template", fields.get(_TEMPLATE_KEY), wanted.pop("default", None))
    for name, template in wanted.items():
        letters = "".join(letter if letter in _LETTERS else "_" for letter in name)  # as the converter writes a name
        yield from _one_template(f"chat template {name}", fields.get(f"{_TEMPLATE_KEY}.{letters}"), template)


def _one_template(named: str, there: str | None, wanted: str | None) -> Iterator[str]:
    if there == wanted:
        return
    if there is None:
        yield f"it has no {named}, unlike the tokenizer"
        return
    if wanted is None:
        yield f"it has a {named}, unlike the tokenizer"
        return
    equal = 0
    for line, wanted_line in zip(there.splitlines(), wanted.splitlines(), strict=False):
        if line != wanted_line:
            break
        equal += 1
    yield f"line {equal + 1} of its {named} is another"


def other_spaces(fields: Mapping[str, Any], model: Model) -> str | None:
    """In which texts llama.cpp sets other spaces than the tokenizer, for the user; None where none is known.

    Of a SentencePiece vocabulary llama.cpp puts a space (``add_space_prefix``) or none before a text and after each
    special token, also where the text begins with one; a tokenizer of transformers may do so before the first word
    only (``"legacy": false``). Other vocabularies are not looked at.
    """
    if fields.get("tokenizer.ggml.model") != "llama":
        return None
    prefix = _SPACE if fields.get("tokenizer.ggml.add_space_prefix", True) else ""
    tokenizer = model.tokenizer
    end = tokenizer.eos_token
    texts = {"a": f"{prefix}a", " a": f"{prefix}{_SPACE}a"}
    if end is not None:
        texts[f"{end}a"] = f"{end}{prefix}a"
    for text, theirs in texts.items():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ours = "".join(tokenizer.convert_ids_to_tokens(ids))
        if ours != theirs:
            break
    else:
        return None
    rule = "a space" if prefix else "no space"
    advice = ""
    if prefix:
        advice = (
            "; with `--override-kv tokenizer.ggml.add_space_prefix=bool:false` it puts none, which is right for "
            "conversations that begin with a special token"
        )
    return (
        f"llama.cpp puts {rule} before a text and after each special token, the tokenizer does not always: it reads "
        f"{text!r} as {ours!r}, llama.cpp as {theirs!r}, so some texts have other tokens there than in training{advice}"
    )


# ---- settings --------------------------------------------------------------------------------------------------------


def _value(config: Any, names: Sequence[str]) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _settings(fields: Mapping[str, Any], model: Model) -> Iterator[str]:
    arch = fields.get("general.architecture", "")
    for key, names in _SIZES.items():
        there = fields.get(f"{arch}.{key}")
        wanted = _value(model.config, names)
        if not isinstance(there, int | float) or not isinstance(wanted, int | float):
            continue
        if not math.isclose(there, wanted, rel_tol=1e-5):
            yield f"{arch}.{key} is {there:g} there, not {wanted:g}"
    normalised = fields.get(f"{arch}.{_NORMALISED}")
    wanted = getattr(model.config, "norm_topk_prob", None)
    if normalised is not None and wanted is not None and bool(normalised) != bool(wanted):
        yield f"{arch}.{_NORMALISED} is {bool(normalised)} there, not {bool(wanted)}"


def _rope_settings(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rope settings of layers that attend to all tokens, and of those that attend to a window."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    whole = given.get("full_attention", given)
    local = given.get("sliding_attention", {})
    theta = getattr(config, "rope_theta", None)
    return ({"rope_theta": theta} if theta else {}) | dict(whole), dict(local)


def _rope(fields: Mapping[str, Any], model: Model, tensors: Mapping[str, Any]) -> Iterator[str]:
    arch = fields.get("general.architecture", "")
    whole, local = _rope_settings(model.config)
    kind = whole.get("rope_type", "default")
    wanted = {"rope.freq_base": whole.get("rope_theta"), "rope.freq_base_swa": local.get("rope_theta")}
    if kind in ("linear", "yarn"):
        wanted["rope.scaling.factor"] = whole.get("factor")
        if f"{arch}.rope.scaling.type" not in fields:
            yield f"its rope is not scaled, the model's is ({kind})"
        elif fields[f"{arch}.rope.scaling.type"] != kind:
            yield f"{arch}.rope.scaling.type is {fields[f'{arch}.rope.scaling.type']!r} there, not {kind!r}"
    if kind == "yarn":
        wanted["rope.scaling.original_context_length"] = whole.get("original_max_position_embeddings")
    for key, value in wanted.items():
        there = fields.get(f"{arch}.{key}")
        if value is not None and there is not None and not math.isclose(there, value, rel_tol=1e-5):
            yield f"{arch}.{key} is {there:g} there, not {value:g}"
    theta = whole.get("rope_theta")
    if theta is not None and f"{arch}.rope.freq_base" not in fields and not math.isclose(theta, 10000.0):
        yield f"it has no {arch}.rope.freq_base, which is {theta:g}"
    if kind == "llama3":
        yield from _factors(tensors, {"rope_freqs.weight": _llama3_factors(whole, _rotated(model.config))})
    if kind == "longrope":
        names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
        yield from _factors(tensors, {name: whole[key] for name, key in names.items() if key in whole})


def _rotated(config: Any) -> int:
    """How many dimensions of a head are rotated."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _llama3_factors(settings: Mapping[str, Any], dimensions: int) -> list[float]:
    """The divisors of each frequency (https://arxiv.org/abs/2407.21783, as in transformers' llama3 rope)."""
    context = settings["original_max_position_embeddings"]
    low, high, factor = (settings[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    divisors = []
    for at in range(0, dimensions, 2):
        length = 2 * math.pi * settings["rope_theta"] ** (at / dimensions)
        if length < context / high:
            divisors.append(1.0)
        elif length > context / low:
            divisors.append(float(factor))
        else:
            smooth = (context / length - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _factors(tensors: Mapping[str, Any], wanted: Mapping[str, Sequence[float]]) -> Iterator[str]:
    for name, values in wanted.items():
        there = tensors[name]() if name in tensors else ()
        is_close = len(there) == len(values)
        if is_close:
            is_close = all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(there, values, strict=True))
        if not is_close:
            yield f"its {name} is not the model's rope scaling"


def _other_layers(fields: Mapping[str, Any], model: Model) -> str | None:
    """Why llama.cpp would let other layers attend to all tokens than the model does; None if it would not."""
    kinds = getattr(model.config, "layer_types", None) or []
    window = [kind == "sliding_attention" for kind in kinds]
    if not any(window) or set(kinds) - {"sliding_attention", "full_attention"}:
        return None
    arch = fields.get("general.architecture", "")
    pattern = fields.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        theirs = [bool(is_window) for is_window in pattern]
    elif f"{arch}.attention.sliding_window" not in fields:
        theirs = [False] * len(window)
        if all(window):  # beyond the window only
            return None
    else:
        period = pattern if isinstance(pattern, int) else _ASSUMED_PERIOD.get(arch)
        if period is None:
            return None
        theirs = [(at + 1) % period != 0 for at in range(len(window))]
    if theirs == window:
        return None
    wrong = []
    for number, (assumed, ours) in enumerate(zip(theirs, window, strict=False)):
        if assumed != ours:
            wrong.append(str(number))
    return (
        f"llama.cpp assumes for {arch} that other layers attend to a window than in this model (layers "
        f"{listed(wrong)}), and would compute something else: {_NO_FILE}"
    )


def _other_routing(fields: Mapping[str, Any], model: Model) -> str | None:
    """Why llama.cpp would weigh a mixture's experts otherwise than the model does; None if it would not."""
    arch = fields.get("general.architecture", "")
    assumed = _ASSUMED_NORMALISED.get(arch)
    wanted = getattr(model.config, "norm_topk_prob", None)
    if assumed is None or wanted is None or assumed == bool(wanted):
        return None
    verb = "divides" if assumed else "does not divide"
    return (
        f"llama.cpp {verb} the weights of a {arch}'s chosen experts by their "
        f"sum, and config.json has norm_topk_prob {wanted}, so it would compute something else: {_NO_FILE}"
    )
