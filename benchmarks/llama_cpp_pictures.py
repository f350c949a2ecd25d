"""A Gemma 3 with its mmproj file in the real llama.cpp, beside transformers: what is read of a prompt with a picture.

    python benchmarks/llama_cpp_pictures.py --llama_cpp DIR --out FILE

``DIR`` as `benchmarks/llama_cpp.py` takes it. A small Gemma 3 with random weights and its tensors named as in published
files gets an adapter, and is merged and exported by the real command. Then the prompt of one question about one picture
is read by ``llama-server`` and by transformers, in float32, with and without the line ends that llama.cpp leaves out
around it. ``top``: the five likeliest next tokens with their log-probabilities; ``difference``: the largest of those of
llama.cpp's five, to transformers' for the same tokens.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks import llama_cpp
from hf_rocm_tune import cli

PART = "{% if p['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}{{ p['text'] | trim }}{% endif %}"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\n' }}{% if m['content'] is string %}"
    f"{{{{ m['content'] | trim }}}}{{% else %}}{{% for p in m['content'] %}}{PART}{{% endfor %}}{{% endif %}}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
NAMED = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
SIDE, ASKED = 56, "What is a river?"


def build(room: Path) -> Path:
    """The adapter's folder; its base is beside it."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    turns = ("<start_of_turn>", "<end_of_turn>")
    tokenizer = llama_cpp.pieces(room / "source", "GemmaTokenizer", turns, names, TEMPLATE)
    more = {"additional_special_tokens": list(NAMED.values())}
    tokenizer.add_special_tokens(more, replace_extra_special_tokens=False)
    tokenizer._set_model_specific_special_tokens(NAMED)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in NAMED.items()}
    ends = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    ends["eos_token_id"] = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**llama_cpp.SIZES, "num_hidden_layers": 6, "query_pre_attn_scalar": 64, "sliding_window": 64}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text, vocab_size=len(tokenizer), **ends),
        vision_config=transformers.SiglipVisionConfig(**tower, image_size=SIDE, patch_size=14),
        mm_tokens_per_image=4,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
        **ends,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, 0, 0.1)
    base, adapter = room / "base", room / "adapter"
    seeing = transformers.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    processor = transformers.Gemma3Processor(
        image_processor=seeing, tokenizer=tokenizer, image_seq_length=4, chat_template=TEMPLATE
    )
    model.save_pretrained(base)
    processor.save_pretrained(base)
    llama_cpp.save_as_published(tokenizer, room / "source", base)
    tensors = load_file(base / "model.safetensors")
    if not any(
        ".vision_model." in name for name in tensors
    ):  # transformers 5.24 writes other names than published ones
        tensors = {
            name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in tensors.items()
        }
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    plain = transformers.AutoModelForImageTextToText.from_pretrained(base)
    lora = LoraConfig(r=4, target_modules=r".*language_model.*q_proj", init_lora_weights=False)
    get_peft_model(plain, lora).save_pretrained(adapter)
    processor.save_pretrained(adapter)
    return adapter


def pictures() -> dict[str, Image.Image]:
    """One that the processor leaves at its size, and one that it makes smaller."""
    noise = torch.randint(256, (SIDE, SIDE, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    large = torch.randint(256, (96, 128, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return {
        "of the tower's size": Image.fromarray(noise.numpy()),
        "made smaller": Image.fromarray(large.numpy()),
    }


def here(model: Any, processor: Any, picture: Image.Image, *, newlines: bool) -> tuple[int, torch.Tensor]:
    """Tokens of the prompt, and the log-probabilities of the next one, by transformers."""
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": ASKED}]
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = dict(processor.apply_chat_template([{"role": "user", "content": parts}], **how))
    if not newlines:
        first = (
            (inputs["input_ids"][0] == processor.tokenizer.convert_tokens_to_ids(NAMED["boi_token"])).nonzero().item()
        )
        last = (
            (inputs["input_ids"][0] == processor.tokenizer.convert_tokens_to_ids(NAMED["eoi_token"])).nonzero().item()
        )
        width = len(processor.tokenizer("\n\n", add_special_tokens=False)["input_ids"])
        kept = torch.ones(inputs["input_ids"].shape[1], dtype=torch.bool)
        kept[first - width : first] = False
        kept[last + 1 : last + 1 + width] = False
        inputs = {name: value[:, kept] if name != "pixel_values" else value for name, value in inputs.items()}
    with torch.inference_mode():
        logs = model(**inputs).logits[0, -1].float().log_softmax(-1)
    return inputs["input_ids"].shape[1], logs


def compared(ask: Any, marker: str, model: Any, processor: Any, picture: Image.Image) -> dict[str, Any]:
    """Both programs, with and without the two line ends around a picture."""
    content = io.BytesIO()
    picture.save(content, "PNG")
    packed = base64.b64encode(content.getvalue()).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{packed}"}}
    turns = [{"role": "user", "content": [url, {"type": "text", "text": ASKED}]}]
    chat = ask("/v1/chat/completions", {"messages": turns, "max_tokens": 1, "temperature": 0})
    found: dict[str, Any] = {"tokens of a chat in llama.cpp": chat["usage"]["prompt_tokens"]}
    for name, around in (("with line ends", "\n\n"), ("without", "")):
        shown = f"{around}{marker}{around}"
        prompt = f"<start_of_turn>user\n{shown}{ASKED}<end_of_turn>\n<start_of_turn>model\n"
        body = {"prompt": {"prompt_string": prompt, "multimodal_data": [packed]}, "n_predict": 1, "n_probs": 5}
        answered = ask("/completion", body | {"temperature": 0, "cache_prompt": False})
        top = answered["completion_probabilities"][0]["top_logprobs"]
        count, logs = here(model, processor, picture, newlines=bool(around))
        found[name] = {
            "tokens": {"llama.cpp": answered["tokens_evaluated"], "transformers": count},
            "top": {"llama.cpp": [each["id"] for each in top], "transformers": logs.topk(5).indices.tolist()},
            "difference": max(abs(each["logprob"] - float(logs[each["id"]])) for each in top),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama_cpp", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-") as folder:
        room = Path(folder)
        adapter, merged = build(room), room / "merged"
        tools = llama_cpp.tools_for(None, given.llama_cpp.absolute(), room / "llama.cpp")
        argv = ["merge", str(adapter), "--base", str(room / "base"), "--llama_cpp", str(tools), "--gguf", "f32"]
        if code := cli.main([*argv, str(merged)]):
            return code
        (seeing,) = (merged / "gguf").glob("mmproj*.gguf")
        (file,) = [path for path in (merged / "gguf").glob("*.gguf") if path != seeing]
        model = transformers.AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval()
        processor = transformers.AutoProcessor.from_pretrained(merged)
        programs = given.llama_cpp / "build" / "bin"
        with llama_cpp.served(programs, file, None, "--mmproj", str(seeing)) as ask:
            marker = ask("/props", None)["media_marker"]
            rows = {name: compared(ask, marker, model, processor, each) for name, each in pictures().items()}
    versions = {"transformers": transformers.__version__, "llama.cpp": llama_cpp.version_of(programs)}
    content = {"command": "llama_cpp_pictures", "versions": versions, "rows": rows}
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    print(given.out.read_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
