"""What a row shows is what the model sees and learns: layouts, cuts, masked placeholders, pictures that are refused."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hf_rocm_tune.publish.commands import talk
from hf_rocm_tune.publish.generate import Settings, loaded_model
from tests import pictures, tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import ADAPTER, done, flags, losses_of, report_of

Train = Callable[..., Result]
COUNT = 16


@pytest.fixture(scope="module")
def model(scratch: Path) -> Path:
    return pictures.build_llava(scratch / "llava-pictures")


@pytest.fixture(scope="module")
def folder(scratch: Path) -> Path:
    """A folder with 16 pictures."""
    pictures.write_files(scratch / "sixteen", COUNT)
    return scratch / "sixteen"


@pytest.fixture
def train(server: CommandServer, model: Path, base_flags: list[str], tmp_path: Path) -> Train:
    """Runs a small job on a data file into ``tmp_path / output``."""

    def run(data: Path, output: str, *more: str, env: dict[str, str] | None = None) -> Result:
        settings = flags(model_name_or_path=model, dataset_name=data, output_dir=tmp_path / output, learning_rate=1e-3)
        settings += flags(save_strategy="steps", save_steps=2)
        return server.run(*base_flags, *settings, *more, env=env)

    return run


def inline(part: Callable[[str], dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Rows with the picture in a part of the user's message."""
    rows = []
    for number in range(COUNT):
        asked = [part(str(folder / f"{number}.png")), {"type": "text", "text": pictures.question(number)}]
        said = {"role": "assistant", "content": [{"type": "text", "text": pictures.answer(number)}]}
        rows.append({"messages": [{"role": "user", "content": asked}, said]})
    return rows


def columns(make: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    return [make(number) for number in range(COUNT)]


def data_url(path: str) -> str:
    return "data:image/png;base64," + base64.b64encode(Path(path).read_bytes()).decode()


def layouts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The same rows in every layout that is read; the first is TRL's."""

    def file(number: int) -> str:
        return str(folder / f"{number}.png")

    def tagged(number: int) -> str:
        return f"<image>{pictures.question(number)}"

    said = pictures.answer
    return {
        "trl": columns(lambda n: {"images": [file(n)], "messages": pictures.turns(n)}),
        "a string": columns(lambda n: {"images": file(n), "messages": pictures.turns(n)}),
        "image": columns(lambda n: {"image": file(n), "messages": pictures.turns(n)}),
        "relative": columns(lambda n: {"images": [f"{n}.png"], "messages": pictures.turns(n)}),
        "qwen": inline(lambda path: {"type": "image", "image": path}, folder),
        "url": inline(lambda path: {"type": "image", "url": f"file://{path}"}, folder),
        "openai": inline(lambda path: {"type": "image_url", "image_url": {"url": data_url(path)}}, folder),
        "llava": columns(
            lambda n: {
                "id": str(n),
                "image": file(n),
                "conversations": [{"from": "human", "value": tagged(n)}, {"from": "gpt", "value": said(n)}],
            }
        ),
        "llamafactory": columns(
            lambda n: {"images": [file(n)], "messages": [{"role": "user", "content": tagged(n)}, pictures.turns(n)[1]]}
        ),
        "alpaca": columns(lambda n: {"images": [file(n)], "instruction": tagged(n), "output": said(n)}),
        "swift": columns(lambda n: {"images": [file(n)], "query": tagged(n), "response": said(n)}),
    }


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("trl", "llava", "alpaca", "swift"), id="sample"),
        pytest.param((), id="all", marks=pytest.mark.long),
    ],
)
def test_every_layout_trains_on_the_same_pictures(
    train: Train, folder: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """The losses of all are those of TRL's layout; of pairs of a question and an answer, those of its own columns."""
    found = {}
    for name, rows in layouts(folder).items():
        if names and name not in names:
            continue
        output = name.replace(" ", "_")
        where = folder / "data.jsonl" if name == "relative" else tmp_path / "data" / output / "data.jsonl"
        done(train(pictures.write_jsonl(where, rows), output))
        report = report_of(tmp_path / output)
        assert report["batches"]["bytes"] > 4 * 2 * 3 * 28 * 28 * 4, name  # the pixels of 4 batches of 2, in float32
        found[name] = losses_of(tmp_path / output)
    pairs = {"alpaca", "swift"}  # the question does not count
    assert all(losses == found["trl"] for name, losses in found.items() if name not in pairs), found
    assert found["alpaca"] == found["swift"] != found["trl"]


def test_relative_paths_are_from_the_folder_that_is_named(
    server: CommandServer, model: Path, train: Train, folder: Path, tmp_path: Path
) -> None:
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", layouts(folder)["relative"])
    refused = train(data, "refused")
    assert refused.code == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "row 1 of the 'train' split: 0.png does not exist" in refused.stderr and "--image_folder" in refused.stderr
    done(train(data, "found", "--image_folder", str(folder)))

    parts = []
    for number in range(2):  # a mixture of two folders, in which the same names are other pictures
        part = tmp_path / f"part {number}"
        pictures.write_files(part / "all", COUNT, first=number)
        rows = columns(lambda n: {"images": [f"all/{n}.png"], "messages": pictures.turns(n)})
        pictures.write_jsonl(part / "train.jsonl", rows)
        parts.append({"path": str(part)})
    recipe = {"model_name_or_path": str(model), "datasets": parts, "output_dir": str(tmp_path / "mixed")}
    (tmp_path / "mixed.yaml").write_text(json.dumps(recipe))
    refused = server.run("--config", str(tmp_path / "mixed.yaml"), "--dry_run")
    assert refused.code == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert f"0.png is another picture in {tmp_path / 'part 0' / 'all'} than in {part / 'all'}" in refused.stderr


def _second_page_cut(path: Path, number: int) -> None:
    noise = [Image.effect_noise((64, 64), 50).convert("RGB") for _ in range(2)]
    pictures.picture(number).save(path, "TIFF", save_all=True, append_images=noise)
    path.write_bytes(path.read_bytes()[:9000])


def test_pictures_in_odd_forms_are_the_same_pictures(train: Train, folder: Path, tmp_path: Path) -> None:
    """Other alphabets and lines of base64, names with blanks, lists in lists, a page and an EXIF that are damaged."""
    plain = inline(lambda path: {"type": "image", "image": path}, folder)
    odd = json.loads(json.dumps(plain))
    content = [(folder / f"{number}.png").read_bytes() for number in range(COUNT)]
    lines = base64.encodebytes(content[0]).decode()
    pictures.picture(3).save(tmp_path / "a blank.png")
    _second_page_cut(tmp_path / "pages.tif", 4)
    damaged = b"Exif\0\0II*\0\x08\0\0\0\xff\x00\x12\x01\x03\x00"
    for rows, more in ((plain, {}), (odd, {"exif": damaged})):
        pictures.picture(5).save(tmp_path / f"{len(more)}.jpg", **more)
        rows[5]["messages"][0]["content"][0]["image"] = str(tmp_path / f"{len(more)}.jpg")
    short = base64.b64encode(content[2]).decode()
    other = base64.urlsafe_b64encode(content[1]).decode().rstrip("=")
    changed = {
        0: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{lines}"}},
        1: {"type": "image", "image": f"data:image/png;base64,{other}"},
        2: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": short}},
        3: {"type": "image", "image": (tmp_path / "a blank.png").as_uri()},
        4: {"type": "image", "image": str(tmp_path / "pages.tif")},
    }
    assert len(short) < 255 and "\n" in lines and "%20" in changed[3]["image"]
    for number, part in changed.items():
        odd[number]["messages"][0]["content"][0] = part
    still = ["--shuffle_dataset", "false", "--train_sampling_strategy", "sequential", "--dataloader_num_workers", "0"]
    done(train(pictures.write_jsonl(tmp_path / "data" / "plain.jsonl", plain), "plain", *still))
    ran = done(train(pictures.write_jsonl(tmp_path / "data" / "odd.jsonl", odd), "odd", *still))
    assert losses_of(tmp_path / "odd") == losses_of(tmp_path / "plain")
    assert "warn" not in ran.stderr.lower(), ran.stderr

    listed = columns(lambda n: {"images": [[str(folder / f"{n}.png")]], "messages": pictures.turns(n)})
    done(train(pictures.write_jsonl(tmp_path / "data" / "lists.jsonl", listed), "lists", "--dry_run"))
    numbers = columns(lambda n: {"images": [n], "messages": pictures.turns(n)})
    refused = train(pictures.write_jsonl(tmp_path / "data" / "numbers.jsonl", numbers), "out")
    assert refused.code == 2 and "row 1 of the 'train' split: a picture is given as 0" in refused.stderr, refused.stderr


def test_placeholders_are_not_in_the_loss_and_a_run_begun_with_them_goes_on(
    train: Train, model: Path, folder: Path, tmp_path: Path
) -> None:
    """The first loss is a plain loop's with hand-masked labels; with the flag it is TRL's."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    rows = layouts(folder)["trl"]
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows)
    still = ["--shuffle_dataset", "false", "--train_sampling_strategy", "sequential", "--learning_rate", "0"]
    output = done(train(data, "ours", *still)).stdout
    assert "do not count in the loss (TRL: --loss_on_picture_tokens)" in output and "0 % of those in the loss" in output
    told = done(train(data, "theirs", *still, "--loss_on_picture_tokens", "true")).stdout
    assert "do not count" not in told

    collator = DataCollatorForVisionLanguageModeling(AutoProcessor.from_pretrained(model))
    plain = AutoModelForImageTextToText.from_pretrained(model).train()
    image = plain.config.image_token_index
    batch = collator([{**row, "images": [Image.open(row["images"][0]).convert("RGB")]} for row in rows[:2]])
    labels = batch.pop("labels")
    for name, wanted in (("theirs", labels), ("ours", labels.masked_fill(batch["input_ids"] == image, -100))):
        loss = plain(**batch, labels=wanted).loss.item()
        assert losses_of(tmp_path / name)[0] == pytest.approx(loss, abs=2e-4), name
    assert (labels == image).sum() == 2 * pictures.TOKENS

    before = ["--loss_on_picture_tokens", "true", "--train_vision_tower", "lora", "--train_projector", "lora"]
    assert train(data, "begun", *before, env=_killed(3)).code < 0
    record = json.loads((tmp_path / "begun" / "run.json").read_text())
    for added in ("loss_on_picture_tokens", "train_vision_tower", "train_projector"):  # as an earlier version wrote it
        del record["settings"][added]
    (tmp_path / "begun" / "run.json").write_text(json.dumps(record))
    resumed = done(train(data, "begun")).stdout
    assert "continues from checkpoint-2" in resumed and "do not count" not in resumed
    assert "not trained" not in resumed
    done(train(data, "whole", *before))
    assert losses_of(tmp_path / "begun")[-1] == losses_of(tmp_path / "whole")[-1]


def _killed(step: int) -> dict[str, str]:
    return {"HF_ROCM_TUNE_CRASH": f"step={step},kind=kill"}


def test_what_max_length_cuts_is_told_and_a_cut_into_a_picture_refused(
    train: Train, folder: Path, tmp_path: Path
) -> None:
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", layouts(folder)["trl"])
    told = done(train(data, "cut", "--max_length", "40")).stdout
    assert "16 of 16 train rows are cut to 40 tokens" in told and "lose tokens that count in the loss" in told
    refused = train(data, "refused", "--max_length", "7")
    assert refused.code == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "row 1 of the 'train' split: --max_length 7 cuts into a picture" in refused.stderr
    assert "--max_pixels" in refused.stderr and "also rows 2, 3" in refused.stderr


# ---- pictures that are refused ---------------------------------------------------------------------------------


def _grey_16(path: Path) -> None:
    Image.fromarray(torch.arange(0, 64000, 1000, dtype=torch.int32).to(torch.uint16).view(8, 8).numpy()).save(path)


def _cut(path: Path) -> None:
    noise = torch.randint(0, 255, (64, 64, 3), dtype=torch.uint8).numpy()
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:3000])


def _bomb(path: Path) -> None:
    from PIL import PngImagePlugin

    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        size = (30000).to_bytes(4, "big")
        PngImagePlugin.putchunk(file, b"IHDR", size, size, b"\x08\x02\x00\x00\x00")
        PngImagePlugin.putchunk(file, b"IDAT", b"")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(missing_ok=True), "does not exist"),
    "empty": (lambda path: path.write_bytes(b""), "is empty (0 bytes)"),
    "a page": (lambda path: path.write_text("<!doctype html><p>404"), "is no picture that Pillow can read"),
    "cut": (_cut, "is cut off or damaged"),
    "16-bit grey": (_grey_16, "mogrify -auto-level -depth 8"),
    "a bomb": (_bomb, "decompression bomb"),
    "a folder": (lambda path: path.mkdir(exist_ok=True), "is a folder"),
}


def test_bad_pictures_are_named_with_their_rows_before_the_model_is_loaded(
    train: Train, folder: Path, tmp_path: Path
) -> None:
    """All kinds in one file: one message, in which each kind has the row and the file."""
    rows = layouts(folder)["trl"]
    for number, (name, (make, _)) in enumerate(BAD.items(), start=3):
        path = tmp_path / f"{name}.png"
        make(path)
        rows[number]["images"] = [str(path)]
    rows[-4]["images"] = ["s3://bucket/never.png"]
    rows[-3]["images"] = ["http://127.0.0.2:9/never more.png"]
    rows[-2]["images"] = ["http://127.0.0.1:9/never.png"]
    rows[-1]["messages"][0]["content"] = "Is <image> a word?"
    refused = train(pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows), "out")
    assert refused.code == 2 and "Traceback" not in refused.stderr, refused.stderr
    assert "row 16 has <image> in its text and row 1 has pictures without it" in refused.stderr

    rows[-1]["messages"] = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}, rows[0]["messages"][1]]
    for row in rows[:-1]:
        row["messages"] = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in row["messages"]]
    rows[-1]["messages"][1] = rows[0]["messages"][1]
    refused = train(pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows), "out")
    assert refused.code == 2 and refused.stderr.count("\n") == 1, refused.stderr
    for number, (name, (_, said)) in enumerate(BAD.items(), start=4):
        assert f"row {number} of the 'train' split: {tmp_path / f'{name}.png'}" in refused.stderr, name
        assert said in refused.stderr, name
    assert "row 13 of the 'train' split: s3://bucket/never.png cannot be fetched, only http" in refused.stderr
    assert "row 14 of the 'train' split: http://127.0.0.2:9/never more.png cannot be fetched" in refused.stderr
    assert "row 15 of the 'train' split: http://127.0.0.1:9/never.png cannot be fetched" in refused.stderr
    assert "row 16 of the 'train' split: 1 picture for 2 placeholders" in refused.stderr
    assert not (tmp_path / "out" / "integrity.json").exists()


@pytest.mark.parametrize("turn", [pytest.param(0, id="question"), pytest.param(1, id="answer", marks=pytest.mark.long)])
def test_a_placeholder_that_stands_in_a_text_is_refused(
    train: Train, model: Path, scratch: Path, folder: Path, tmp_path: Path, turn: int
) -> None:
    """The processor would put a picture there that the row does not have; each model has its own word for one."""
    other = scratch / "llava-pad"
    for base, token in ((model, "<image>"), (other, "<|image_pad|>")):
        if not base.exists():
            pictures.build_llava(base, token)
        rows = inline(lambda path: {"type": "image", "image": path}, folder)
        data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows)
        done(train(data, "good", "--model_name_or_path", str(base), "--dry_run"))
        rows[6]["messages"][turn]["content"][-1]["text"] = f"the word {token} in the middle"
        refused = train(pictures.write_jsonl(data, rows), "out", "--model_name_or_path", str(base))
        assert refused.code == 2 and refused.stderr.count("\n") == 1, refused.stderr
        assert f"row 7 of the 'train' split: its text contains {token}" in refused.stderr


def test_larger_pictures_are_made_smaller(train: Train, tmp_path: Path) -> None:
    """As a person would make them: the same run on copies that were resized before."""
    noise = torch.Generator().manual_seed(3)
    for number in range(COUNT):
        pixels = torch.randint(256, (80, 120, 3), generator=noise, dtype=torch.uint8)
        picture = Image.fromarray(pixels.numpy())
        for folder, one in {"large": picture, "small": picture.resize((60, 40), Image.Resampling.BICUBIC)}.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            one.save(tmp_path / folder / f"{number}.png")
    data = {
        folder: pictures.write_jsonl(tmp_path / folder / "rows.jsonl", layouts(tmp_path / folder)["trl"])
        for folder in ("large", "small")
    }
    done(train(data["large"], "reduced", "--max_pixels", "2400"))
    done(train(data["small"], "copies"))
    done(train(data["large"], "whole"))
    assert losses_of(tmp_path / "reduced") == losses_of(tmp_path / "copies") != losses_of(tmp_path / "whole")
    for value in ("0", "-4", "many"):
        refused = train(data["large"], "refused", "--max_pixels", value)
        assert refused.code == 2 and "--max_pixels" in refused.stderr, (value, refused.stderr)
        assert refused.stderr.count("\n") == 1 and not (tmp_path / "refused").exists()


def test_transparency_is_said(train: Train, folder: Path, tmp_path: Path) -> None:
    pictures.picture(5, mode="RGBA").save(tmp_path / "clear.png")
    rows = layouts(folder)["trl"]
    rows[4]["images"] = [str(tmp_path / "clear.png")]
    told = done(train(pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows), "out")).stdout
    assert "1 train picture with transparency" in told


def test_parts_that_are_no_pictures_are_refused(train: Train, folder: Path, tmp_path: Path) -> None:
    rows = inline(lambda path: {"type": "video", "video": path}, folder)
    refused = train(pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows), "out")
    assert refused.code == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "row 1 of the 'train' split: a part of a message is video" in refused.stderr


# ---- the preview, the plan, and what is only found later ---------------------------------------------------------


def test_the_preview_and_the_plan_show_rows_with_pictures(
    server: CommandServer, train: Train, model: Path, folder: Path, tmp_path: Path
) -> None:
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", layouts(folder)["qwen"])
    shown = json.loads(done(train(data, "out", "--dry_run", "json")).stdout)
    row = shown["rows"][0]
    assert row["pictures"] == [[40, 32]]
    unseen = [piece["text"] for piece in row["parts"]["row"] if not piece["counts"]]
    assert unseen == ["<image> x 4 "]
    assert shown["pictures"][0]["pictures"] == COUNT and shown["pictures"][0]["median"] == pictures.TOKENS
    assert "a train row with 40 x 32 pixels" in done(train(data, "out", "--dry_run")).stdout

    argv = ["--model", str(model), "--dataset", str(data), "--method", "lora", "--batch_size", "16", "--json"]
    plan = json.loads(done(server.run(*argv, env={"VERB": "plan"})).stdout)
    assert plan["data"]["rows"] == COUNT and not any("only" in note for note in plan["notes"])
    length = str(plan["request"]["length"])
    text = server.run(argv[0], argv[1], *argv[4:], "--max_length", length, env={"VERB": "plan"})
    peaks = [one["choice"]["moments"]["start"] for one in (plan, json.loads(done(text).stdout))]
    pixels = 16 * 3 * 28 * 28 * 4
    assert peaks[0] - peaks[1] > 2 * pixels  # of the batch and of the one ahead, and what the tower makes of them


def test_a_picture_that_is_bad_later_leaves_a_checkpoint_and_is_named(
    train: Train, folder: Path, tmp_path: Path
) -> None:
    """Of a stream only the first rows are looked through; in a table the row is found again by its content."""
    rows = [layouts(folder)["trl"][number % COUNT] for number in range(120)]
    (tmp_path / "empty.png").write_bytes(b"")
    rows[110] = {**rows[110], "images": [str(tmp_path / "empty.png")]}
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows)
    more = ["--dataset_streaming", "true", "--max_steps", "70", "--save_steps", "1000"]
    ended = train(data, "out", *more, "--per_device_train_batch_size", "4", "--sentinel_every", "0")
    assert ended.code == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert f"{tmp_path / 'empty.png'} is empty (0 bytes)" in ended.stderr
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] and "is written" in ended.stderr


@pytest.mark.parametrize("method", ["sft", pytest.param("dpo", marks=pytest.mark.long)])
def test_a_step_with_pictures_that_does_not_fit_is_repeated_in_parts(
    train: Train, folder: Path, tmp_path: Path, method: str
) -> None:
    """Each part has the pixels of its own rows: the run ends where the undisturbed one ends; one row cannot be cut."""
    rows = layouts(folder)["trl"]
    for number, row in enumerate(rows):
        row["images"] = [str(folder / f"{(number + each) % COUNT}.png") for each in range(number % 3)]
    if method == "dpo":
        answers = [[{"role": "assistant", "content": text}] for text in ("A colour.", "No idea at all.")]
        chosen = dict(zip(("chosen", "rejected"), answers, strict=True))
        rows = [{"images": row["images"], "prompt": row["messages"][:1], **chosen} for row in rows]
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows)
    more = ["--per_device_train_batch_size", "4", "--optim", "sgd", "--learning_rate", "0.1"]

    def run(output: str, fault: str) -> Result:
        return train(data, output, *more, env={"METHOD": method, "HF_ROCM_TUNE_STEP_FAULT": fault})

    done(run("plain", ""))
    done(run("parts", "kind=oom,rows=1"))
    assert losses_of(tmp_path / "parts") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-4)
    found = [row for row in report_of(tmp_path / "parts")["incidents"] if row["kind"] == "out of memory"]
    assert [row["divisor"] for row in found] == [1, 2] and {row["outcome"] for row in found} == {"recovered"}
    if method == "sft":
        refused = run("refused", "kind=oom,rows=0")
        assert refused.code == 5 and "of them of" in refused.stderr and "--max_pixels" in refused.stderr, refused.stderr


# ---- which parts are trained -----------------------------------------------------------------------------------


def _trained(directory: Path) -> set[str]:
    from safetensors.torch import load_file

    return {name.split(".")[3] for name in load_file(directory / "adapter_model.safetensors")}


def test_the_language_part_is_adapted_unless_more_is_asked_for(
    server: CommandServer, model: Path, base_flags: list[str], train: Train, folder: Path, tmp_path: Path
) -> None:
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", layouts(folder)["trl"])
    said = done(train(data, "language")).stdout
    assert _trained(tmp_path / "language") == {"language_model"}
    assert "not trained: the vision tower" in said and "the projector (8,320)" in said

    said = done(train(data, "all", "--train_vision_tower", "lora", "--train_projector", "whole")).stdout
    assert _trained(tmp_path / "all") == {"language_model", "vision_tower", "multi_modal_projector"}
    assert "not trained" not in said

    own = ["--lora_target_modules", "fc1", "q_proj"]
    done(train(data, "own", *own))
    assert _trained(tmp_path / "own") == {"language_model", "vision_tower"}

    refused = train(data, "full", "--use_peft", "false", "--train_projector", "lora")
    assert refused.code == 2 and "belong to a new adapter" in refused.stderr
    at = base_flags.index("--lora_dropout")  # an adapter has its own
    further = [*base_flags[:at], *base_flags[at + 2 :]]
    more = flags(model_name_or_path=model, dataset_name=data, output_dir=tmp_path / "on")
    done(server.run(*further, *more, "--adapter_name_or_path", str(tmp_path / "all")))
    assert _trained(tmp_path / "on") == _trained(tmp_path / "all")


def test_a_projector_without_linear_layers_is_trained_whole(
    server: CommandServer, train: Train, folder: Path, tmp_path: Path
) -> None:
    """Gemma 3's is a matrix: no adapter fits it, and all of it is in the adapter's file and the merged model."""
    from safetensors.torch import load_file

    base = ["--model_name_or_path", str(pictures.build_gemma3(tmp_path / "gemma3"))]
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", layouts(folder)["trl"])
    refused = train(data, "refused", *base, "--train_projector", "lora")
    assert refused.code == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "--train_projector whole trains it" in refused.stderr
    done(train(data, "whole", *base, "--train_projector", "whole"))
    (name,) = [name for name in load_file(tmp_path / "whole" / ADAPTER) if "mm_input_projection_weight" in name]
    done(server.run(str(tmp_path / "whole"), str(tmp_path / "merged"), env={"VERB": "merge"}))
    trained = load_file(tmp_path / "whole" / ADAPTER)[name]
    (written,) = [value for key, value in _tensors(tmp_path / "merged").items() if key.endswith("projection_weight")]
    (before,) = [value for key, value in _tensors(Path(base[1])).items() if key.endswith("projection_weight")]
    assert torch.equal(written, trained.to(written.dtype)) and not torch.equal(written, before)


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


# ---- results ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's, in plain use
def test_an_answer_about_a_picture_is_plain_transformers_and_so_is_the_cards_snippet(
    server: CommandServer, model: Path, train: Train, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the adapter, and of the merged model; another picture gives other pixels, a missing one is one line."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoProcessor

    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", layouts(folder)["trl"])
    run, merged, asked = tmp_path / "run", tmp_path / "merged", pictures.question(3)
    samples = ["--sample_every", "8", "--sample_prompts", asked, "--sample_images", str(folder / "3.png")]
    done(train(data, "run", "--max_steps", "8", *samples))
    done(server.run(str(run), str(merged), env={"VERB": "merge"}))
    options = ["--prompt", asked, "--max_new_tokens", "8", "--temperature", "0", "--json"]

    def answered(directory: Path, picture: str = "3.png") -> Result:
        more = ["--image", str(folder / picture)]
        return server.run(str(directory), *options, *more, env={"VERB": "generate"})

    plain = AutoModelForImageTextToText.from_pretrained(model)
    adapted = PeftModel.from_pretrained(plain, str(run)).eval()
    processor = AutoProcessor.from_pretrained(run)
    parts = [{"type": "image", "path": str(folder / "3.png")}, {"type": "text", "text": asked}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    made = adapted.generate(**inputs, max_new_tokens=8, do_sample=False)
    wanted = processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for directory in (run, merged):
        said = json.loads(done(answered(directory)).stdout.splitlines()[-1])
        assert said["completion"] == wanted and said["prompt_tokens"] == inputs["input_ids"].shape[1], directory
    refused = answered(run, "never.png")
    assert refused.code == 2 and "never.png does not exist" in refused.stderr
    log = json.loads((run / "training_log.json").read_text())["log"]
    (sampled,) = next(row["samples"] for row in log if "samples" in row)
    assert sampled["prompt"] == f"{asked} (3.png)" and sampled["text"].startswith(wanted)

    # a conversation with its pictures in its messages, from a file and in a chat
    shown = {"type": "image", "image": str(folder / "3.png")}
    conversation = {"messages": [{"role": "user", "content": [shown, {"type": "text", "text": asked}]}]}
    prompts = pictures.write_jsonl(tmp_path / "prompts.jsonl", [conversation])
    argv = [str(run), "--file", str(prompts), *options[2:]]
    said = json.loads(done(server.run(*argv, env={"VERB": "generate"})).stdout.splitlines()[-1])
    assert said["completion"] == wanted
    with loaded_model(Settings(model=str(run), max_new_tokens=8, temperature=0.0), lambda _: None) as loaded:
        lines = [f"/image {folder}/never.png", f"/image {folder / '3.png'}", asked, "And what else?", "/reset", asked]
        first, answer = talk(loaded, iter(lines[:3]))
        assert first["content"][0]["image"] == str(folder / "3.png") and answer["content"] == wanted
        assert len(talk(loaded, iter(lines[:4]))) == 4  # the picture stays in the conversation
        assert isinstance(talk(loaded, iter(lines))[0]["content"], str)

    # the page shows a few pictures, which are no part of what is published
    done(server.run(str(run), env={"VERB": "report"}))
    page = (run / "report.html").read_text()
    assert page.count('src="data:image/jpeg;base64,') == 4 and 'alt="a picture of row 1"' in page
    assert "pictures.json" not in json.loads((run / "integrity.json").read_text())["files"]

    card = (run / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and "AutoProcessor.from_pretrained(adapter)" in card
    snippets = [part.partition("```")[0] for part in card.split("```python\n")[1:]]
    pictures.picture(3).save(tmp_path / "picture.png")
    code = "\n".join(snippets[:2]).replace('"picture.png"', repr(str(tmp_path / "picture.png")))
    code = code.replace('base_model = "', f'base_model = "{model}"  # "').replace('adapter = "."', f'adapter = "{run}"')
    exec(compile(code, "card", "exec"), {})


def test_pictures_of_which_the_processor_makes_no_pixels_are_refused(model: Path, folder: Path) -> None:
    from transformers import AutoProcessor
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from hf_rocm_tune.data.picture_batches import PictureCollator
    from hf_rocm_tune.data.pictures import PictureRows
    from hf_rocm_tune.errors import PictureError

    class Blind(DataCollatorForVisionLanguageModeling):
        def torch_call(self, examples: list[Any]) -> Any:
            batch = super().torch_call(examples)
            del batch["pixel_values"]
            return batch

    row = layouts(folder)["trl"][0]
    with pytest.raises(PictureError, match="made no pixels"):
        PictureCollator(Blind(AutoProcessor.from_pretrained(model)), PictureRows(), placeholders=frozenset())([row])


def test_thinking_is_masked(train: Train, folder: Path, tmp_path: Path) -> None:
    rows = layouts(folder)["trl"]
    for row in rows:
        row["messages"][1]["content"] = f"<think>Look at it.</think>{row['messages'][1]['content']}"
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows)
    counted, others = _texts(train(data, "out", "--dry_run", "json", "--mask_thinking", "true"))
    assert "<think>Look at it.</think>" in others and "Look" not in counted


def _texts(shown: Result) -> tuple[str, str]:
    """The text of the first row of a preview that counts in the loss, and the rest."""
    pieces = json.loads(done(shown).stdout)["rows"][0]["parts"]["row"]
    return tuple("".join(piece["text"] for piece in pieces if piece["counts"] is wanted) for wanted in (True, False))


def test_answers_are_found_in_a_template_without_marks(train: Train, folder: Path, tmp_path: Path) -> None:
    """In a conversation with pictures in both questions; a message that says so is left out or learned, too."""
    rows = inline(lambda path: {"type": "image", "image": path}, folder)
    for row in rows:
        row["messages"] += json.loads(json.dumps(row["messages"]).replace("What colour", "And which colour"))
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows)
    flag = ["--assistant_only_loss", "true", "--max_length", "128"]
    counted, others = _texts(train(data, "out", *flag, "--dry_run", "json"))
    answer = f"{pictures.answer(0)}<|im_end|>\n"
    assert counted == 2 * answer and "And which colour" in others and others.count("<image> x 4") == 2
    assert "found by their prefixes" in done(train(data, "learned", *flag)).stdout
    done(train(data, "all"))
    assert losses_of(tmp_path / "learned") != losses_of(tmp_path / "all")

    for row in rows:
        for number, message in enumerate(row["messages"]):
            message["weight"] = 0 if number == 1 else 1
    counted, others = _texts(train(pictures.write_jsonl(data, rows), "out", *flag[2:], "--dry_run", "json"))
    assert counted.count(answer) == 1 and "What colour" in counted and answer in others

    for row in rows:  # a picture in an answer stands expanded among its tokens
        asked = {name: value for name, value in row["messages"][0].items() if name != "weight"}
        row["messages"] = [asked, {**asked, "role": "assistant"}]
    refused = train(pictures.write_jsonl(data, rows), "out", *flag)
    assert refused.code == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "row 1 of the 'train' split: the tokens of message 2 are not found" in refused.stderr


def test_a_prompt_of_text_and_its_pictures_become_messages(train: Train, folder: Path, tmp_path: Path) -> None:
    """A text has no place for them; its own columns are not called unused."""
    rows = columns(
        lambda n: {
            "images": [str(folder / f"{n}.png")],
            "prompt": pictures.question(n),
            "completion": pictures.answer(n),
        }
    )
    shown = train(pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows), "out", "--dry_run", "json")
    counted, others = _texts(shown)
    assert counted == f"{pictures.answer(0)}<|im_end|>\n" and "<image> x 4" in others
    assert "not used" not in shown.stdout + shown.stderr


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")  # its processor
def test_a_model_that_reads_its_prompt_in_both_directions_does_not_see_what_it_learns(
    server: CommandServer, base_flags: list[str], folder: Path, tmp_path: Path
) -> None:
    """PaliGemma: with the types of tokens that its processor gives a whole conversation, it would copy the answer."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from hf_rocm_tune.data.picture_batches import PictureCollator
    from hf_rocm_tune.data.pictures import PictureRows

    model = pictures.build_paligemma(tmp_path / "paligemma")
    rows = layouts(folder)["trl"]
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows)
    settings = [*base_flags, *flags(model_name_or_path=model, dataset_name=data, output_dir=tmp_path / "out")]
    counted, _ = _texts(server.run(*settings, "--dry_run", "json"))
    assert counted == f"{pictures.answer(0)}<|im_end|>\n"
    told = done(server.run(*settings)).stdout
    assert "the last answer of a conversation is in the loss" in told

    processor, plain = AutoProcessor.from_pretrained(model), AutoModelForImageTextToText.from_pretrained(model).train()
    stock = DataCollatorForVisionLanguageModeling(processor)
    batch = PictureCollator(stock, PictureRows(), placeholders=frozenset())(rows[:1])
    labels = batch.pop("labels")[0]
    learned = (labels != -100).nonzero().flatten().tolist()
    before = plain(**batch).logits
    batch["input_ids"][0, learned[2]] += 1
    moved = (plain(**batch).logits != before).any(dim=-1)[0]
    assert moved[learned[2] :].all() and not moved[: learned[2]].any()

    pairs = [{"chosen": row["messages"][1:], "rejected": [{"role": "assistant", "content": "No."}]} for row in rows]
    pairs = [
        {**pair, "images": row["images"], "prompt": row["messages"][:1]} for pair, row in zip(pairs, rows, strict=True)
    ]
    data_of_pairs = pictures.write_jsonl(tmp_path / "pairs" / "rows.jsonl", pairs)
    of_pairs = flags(dataset_name=data_of_pairs, output_dir=tmp_path / "no pairs")
    refused = server.run(*settings[:-2], *of_pairs, env={"METHOD": "dpo"})
    assert refused.code == 2 and "train this model with sft" in refused.stderr, refused.stderr

    rows[3]["images"] = []
    refused = server.run(
        *settings[:-2], *flags(output_dir=tmp_path / "no", dataset_name=pictures.write_jsonl(data, rows))
    )
    assert refused.code == 2 and "row 4 of the 'train' split: it has no picture" in refused.stderr, refused.stderr


def _of_prompts(folder: Path, placeholder: str) -> dict[str, list[dict[str, Any]]]:
    """Prompts and completions about pictures: of messages, and of text with a placeholder."""

    def beside(n: int) -> dict[str, Any]:
        return {"images": [str(folder / f"{n}.png")]}

    return {
        "messages": columns(
            lambda n: beside(n) | {"prompt": pictures.turns(n)[:1], "completion": pictures.turns(n)[1:]}
        ),
        "text": columns(
            lambda n: beside(n) | {"prompt": f"{placeholder}{pictures.question(n)} ", "completion": pictures.answer(n)}
        ),
    }


@pytest.mark.parametrize("layout", ["messages", "text"])
def test_what_a_processor_makes_for_each_token_is_made_for_those_of_the_completion_too(
    server: CommandServer, base_flags: list[str], folder: Path, tmp_path: Path, layout: str
) -> None:
    """Llama 3.2 Vision's mask of what tokens look at: TRL's ends with the prompt, so that no step was possible."""
    model = pictures.build_mllama(tmp_path / "mllama")
    if layout == "text":
        (model / "chat_template.jinja").unlink()
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", _of_prompts(folder, "<|image|>")[layout])
    settings = [*base_flags, *flags(model_name_or_path=model, dataset_name=data, output_dir=tmp_path / "out")]
    counted, others = _texts(server.run(*settings, "--dry_run", "json"))
    assert pictures.answer(0) in counted and "<|image|>" in others and pictures.question(0) in others
    assert "?" not in counted
    done(server.run(*settings, "--max_length", "44"))  # cuts a few
    asked = ["--model", str(model), "--dataset", str(data), "--method", "lora", "--json"]
    plan = json.loads(done(server.run(*asked, env={"VERB": "plan"})).stdout)
    assert not any("pictures cannot be counted" in note for note in plan["notes"])


def test_a_model_that_takes_no_embeddings_is_not_told_that_there_are_none(
    server: CommandServer, base_flags: list[str], folder: Path, tmp_path: Path
) -> None:
    """PEFT hands on that ``inputs_embeds`` is None, which BLIP hands on beside its own."""
    from transformers import BlipConfig, BlipForConditionalGeneration, BlipImageProcessorPil, BlipProcessor

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokenizer = tiny.build_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    text = {**size, **ids, "sep_token_id": tokenizer.eos_token_id, "vocab_size": 512, "encoder_hidden_size": 64}
    config = BlipConfig(vision_config={**size, "image_size": 28, "patch_size": 14}, text_config=text)
    tokenizer.chat_template = None
    BlipForConditionalGeneration(config).save_pretrained(tmp_path / "blip")
    looking = BlipImageProcessorPil(size={"height": 28, "width": 28})
    BlipProcessor(looking, tokenizer).save_pretrained(tmp_path / "blip")
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", _of_prompts(folder, "")["text"])
    settings = flags(model_name_or_path=tmp_path / "blip", dataset_name=data, output_dir=tmp_path / "out")
    refused = server.run(*base_flags, *settings)
    assert refused.code == 2 and "give --gradient_checkpointing false" in refused.stderr, refused.stderr[-2000:]
    trained = flags(output_dir=tmp_path / "again", gradient_checkpointing="false")
    done(server.run(*base_flags, *settings, *trained))


def test_pictures_are_given_in_one_list_to_a_processor_that_takes_no_lists_of_rows(
    train: Train, model: Path, folder: Path, tmp_path: Path
) -> None:
    """GOT-OCR 2's."""
    from transformers import AutoTokenizer, GotOcr2ImageProcessorPil, GotOcr2Processor

    other = shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<img>", "</img>", "<imgpad>"]})
    template = pictures.TEMPLATE.replace("<image>", "<img><imgpad></img>")
    processor = GotOcr2Processor(GotOcr2ImageProcessorPil(), tokenizer, chat_template=template)
    processor.save_pretrained(other)
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", layouts(folder)["trl"])
    more = ["--max_length", "400", "--model_name_or_path", str(other)]
    counted, others = _texts(train(data, "out", "--dry_run", "json", *more))
    assert "<imgpad> x 256" in counted + others


def test_answers_that_are_marked_good_or_bad_are_trained_with_their_pictures(
    train: Train, folder: Path, tmp_path: Path
) -> None:
    rows = columns(
        lambda n: {
            "images": [str(folder / f"{n}.png")],
            "prompt": pictures.turns(n)[:1],
            "completion": pictures.turns(n)[1:],
            "label": n % 3 > 0,
        }
    )
    data = pictures.write_jsonl(tmp_path / "data" / "rows.jsonl", rows)
    done(train(data, "out", env={"METHOD": "kto"}))
    report = report_of(tmp_path / "out")
    assert report["batches"]["bytes"] > 4 * 2 * 3 * 28 * 28 * 4 and report["batches"]["mismatches"] == 0
