"""Small models and data under the names for which scripts of others ask; see `benchmarks.foreign_scripts`."""

from __future__ import annotations

import csv
import json
import shutil
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from hf_rocm_tune.errors import UsageError
from tests.tiny import build, build_tokenizer, training_text

CSV_ROWS = 48
PICTURES = 6


def bert(folder: Path, _sources: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = build_tokenizer(chat_template=False)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def pairs() -> list[dict[str, Any]]:
    """Rows as MRPC has them: of two texts, whether they have the same first word."""
    texts = [" ".join(text.split()[:6]) for text in training_text() if len(text.split()) > 4]
    rows = []
    for number in range(CSV_ROWS):
        first, second = texts[number % len(texts)], texts[(number * 7) % len(texts)]
        rows.append({"sentence1": first, "sentence2": second, "label": number % 2, "idx": number})
    return rows


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def dataset(folder: Path, config: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    """A data set with one configuration, as the Hub has them."""
    folder.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {split}.csv\n" for split in rows)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
    for split, content in rows.items():
        write_rows(folder / f"{split}.csv", content)


def glue(folder: Path, sources: Path) -> None:
    dataset(folder / "data", "mrpc", {"train": pairs(), "validation": pairs()[:20], "test": pairs()[:10]})
    metric(folder / "metric", sources, "glue")


def metric(folder: Path, sources: Path, name: str) -> None:
    shutil.copytree(sources / "evaluate" / "metrics" / name, folder)


def wikitext(folder: Path, _sources: Path) -> None:
    texts = training_text()
    rows = [{"text": texts[number % len(texts)]} for number in range(512)]  # the script takes the first 500
    dataset(folder, "wikitext-2-v1", {"train": rows, "validation": rows[:12], "test": rows[:12]})


def smollm(folder: Path, _sources: Path) -> None:
    shutil.copytree(build("llama3", folder.parent / "built"), folder)


def csv_of_pairs(folder: Path, _sources: Path) -> None:
    write_rows(folder, [{name: row[name] for name in ("sentence1", "sentence2", "label")} for row in pairs()])


def words(folder: Path, _sources: Path) -> None:
    folder.mkdir(parents=True)
    lines = [line for text in training_text() for line in text.splitlines() if line.strip()]
    for name in ("train", "valid", "test"):
        (folder / f"{name}.txt").write_text("\n".join(lines[:60]) + "\n", encoding="utf-8")


def pictures(folder: Path, _sources: Path) -> None:
    from PIL import Image

    (folder / "train").mkdir(parents=True)
    random = torch.Generator().manual_seed(2)
    with (folder / "train" / "metadata.jsonl").open("w", encoding="utf-8") as stream:
        for number in range(PICTURES):
            data = torch.randint(0, 256, (72, 80, 3), generator=random, dtype=torch.uint8)
            Image.fromarray(data.numpy()).save(folder / "train" / f"{number}.png")
            stream.write(json.dumps({"file_name": f"{number}.png", "text": f"a picture {number}"}) + "\n")


def instances(folder: Path, sources: Path) -> None:
    """The pictures alone."""
    pictures(folder / "all", sources)
    for file in (folder / "all" / "train").glob("*.png"):
        file.rename(folder / file.name)
    shutil.rmtree(folder / "all")


def clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[], model_max_length=77)


def text_encoder(kind: str, width: int) -> Any:
    import transformers

    torch.manual_seed(3)
    config = transformers.CLIPTextConfig(
        vocab_size=514, hidden_size=width, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=77, projection_dim=width, bos_token_id=512, eos_token_id=513, pad_token_id=513,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def autoencoder() -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(4)
    return AutoencoderKL(
        block_out_channels=(32, 64), in_channels=3, out_channels=3, latent_channels=4, sample_size=64,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def stable_diffusion(folder: Path, _sources: Path) -> None:
    from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    torch.manual_seed(5)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=32, in_channels=4, out_channels=4,
        cross_attention_dim=32, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    StableDiffusionPipeline(
        unet=unet, vae=autoencoder(), text_encoder=text_encoder("CLIPTextModel", 32), tokenizer=clip_tokenizer(),
        scheduler=DDPMScheduler(beta_schedule="scaled_linear", num_train_timesteps=1000), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


def stable_diffusion_xl(folder: Path, _sources: Path) -> None:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    torch.manual_seed(6)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=32, in_channels=4, out_channels=4,
        cross_attention_dim=64, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=(2, 4),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8, transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=8 * 6 + 32,
    )  # fmt: skip
    StableDiffusionXLPipeline(
        unet=unet, vae=autoencoder(), tokenizer=clip_tokenizer(), tokenizer_2=clip_tokenizer(),
        text_encoder=text_encoder("CLIPTextModel", 32), text_encoder_2=text_encoder("CLIPTextModelWithProjection", 32),
        scheduler=EulerDiscreteScheduler(beta_schedule="scaled_linear"),
    ).save_pretrained(folder)  # fmt: skip


def mnist(folder: Path, _sources: Path) -> None:
    """Random digits in MNIST's files."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = torch.Generator().manual_seed(8)
    for name, count in (("train", 192), ("t10k", 64)):
        images = torch.randint(0, 256, (count, 28, 28), generator=random, dtype=torch.uint8)
        labels = torch.randint(0, 10, (count,), generator=random, dtype=torch.uint8)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, count, 28, 28) + images.numpy().tobytes()
        )
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.numpy().tobytes())


def pets(folder: Path, _sources: Path) -> None:
    """Pictures of two kinds, named as those of the Oxford-IIIT pets are."""
    from PIL import Image

    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(9)
    for number in range(10):
        data = torch.randint(0, 256, (72, 80, 3), generator=random, dtype=torch.uint8)
        Image.fromarray(data.numpy()).save(folder / f"{('beagle', 'persian')[number % 2]}_{number}.jpg")


_RESNET = "timm/resnet50d.ra2_in1k"


def resnet(folder: Path, _sources: Path) -> None:
    """Random weights of a ResNet, in the cache of the Hub."""
    import timm
    from safetensors.torch import save_file

    known = timm.get_pretrained_cfg("resnet50d")
    if known is None or known.hf_hub_id != _RESNET:
        raise UsageError(f"this version of timm takes resnet50d from elsewhere than {_RESNET}: {known}")
    torch.manual_seed(10)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0")
    snapshot = folder / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    save_file(timm.create_model("resnet50d").state_dict(), snapshot / "model.safetensors")


#: The name in the directory of data, what makes it, and the places in a run's directory that point to it.
DATA: dict[str, tuple[str, Callable[[Path, Path], None], dict[str, str]]] = {
    "bert": (
        "bert-base-cased", bert,
        {"bert-base-cased": "", "hf-internal-testing/mrpc-bert-base-cased": ""},
    ),
    "glue": ("glue", glue, {"nyu-mll/glue": "data", "glue": "metric"}),
    "accuracy": ("accuracy", lambda folder, sources: metric(folder, sources, "accuracy"), {"accuracy": ""}),
    "wikitext": ("wikitext", wikitext, {"Salesforce/wikitext": ""}),
    "smollm": ("smollm", smollm, {"HuggingFaceTB/SmolLM-360M": ""}),
    "pairs": ("pairs.csv", csv_of_pairs, {}),
    "words": ("words", words, {}),
    "pictures": ("pictures", pictures, {}),
    "instances": ("instances", instances, {}),
    "stable-diffusion": ("stable-diffusion", stable_diffusion, {}),
    "stable-diffusion-xl": ("stable-diffusion-xl", stable_diffusion_xl, {}),
    "mnist": ("mnist", mnist, {"../data": ""}),
    "pets": ("pets", pets, {}),
    "resnet": ("resnet", resnet, {f"../cache/hub/models--{_RESNET.replace('/', '--')}": ""}),
}  # fmt: skip


def make(names: Iterable[str], made: Path, sources: Path) -> None:
    """Make what is not there yet."""
    made.mkdir(parents=True, exist_ok=True)
    for name in names:
        target, build_it, _ = DATA[name]
        if not (made / target).exists():
            build_it(made / target, sources)


def link(names: Iterable[str], made: Path, cwd: Path) -> None:
    """Put links to the data into a run's directory, under the names for which scripts ask."""
    for name in names:
        target, _, places = DATA[name]
        for place, part in places.items():
            link_ = cwd / place
            link_.parent.mkdir(parents=True, exist_ok=True)
            link_.symlink_to(made / target / part, target_is_directory=True)
