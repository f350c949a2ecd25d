"""Pictures of rows: where a row names them, how they are opened, and what is refused.

A row names its pictures in TRL's columns ``images`` and ``image``, or inside its messages: as parts with the picture in
them (Qwen's, OpenAI's and Anthropic's form), or as ``<image>`` in the text (LLaVA's, LLaMA-Factory's and ms-swift's).
`PictureRows` turns each of these into what TRL's collators read, when a batch is made: the rows on disk stay as they
are. Nothing here imports torch, and Pillow is imported with the first picture.
"""

from __future__ import annotations

import base64
import binascii
import copy
import filecmp
import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from hf_rocm_tune.data.formats import STREAMED_ROWS
from hf_rocm_tune.data.sources import COLUMNS, OTHER_MEDIA, PICTURE_PARTS, TURNS, columns_of
from hf_rocm_tune.errors import PictureError, UsageError, count_of
from hf_rocm_tune.machine.caches import unwritable
from hf_rocm_tune.paths import expand_user

if TYPE_CHECKING:
    from PIL.Image import Image

    from hf_rocm_tune.data.sources import Rows

TAG = "<image>"  # what the toolkits write into a text where a picture belongs
_PAYLOADS = ("image", "image_url", "url", "path", "base64", "source", "bytes")  # keys of a part that hold a picture
_GREY_16 = ("I", "I;16", "I;16L", "I;16B", "I;16N", "F")
_ADDRESS_SECONDS = 20
_NAME_LENGTH = 200  # of a picture in a message
# Of large pictures, and of what stands beside pixels, such as damaged EXIF. Once for all: pictures are read in threads.
warnings.filterwarnings("ignore", module=r"PIL\.")
_URL_SAFE = str.maketrans("-_", "+/")  # the other alphabet of base64


@dataclass(frozen=True, kw_only=True)
class PictureRows:
    """How the pictures of a data set are read.

    ``folders`` are where relative paths are looked up, in this order; ``tags``: whether ``<image>`` in a text stands
    for a picture; ``max_pixels``: larger pictures are made smaller, with their aspect; ``as_rgb``: whether all become
    RGB here, because the model's processor does not convert them; ``literals``: what the model reads as a placeholder
    wherever it stands, so that no text may contain it; ``folder_flag``: how the user names another folder.
    """

    folders: tuple[Path, ...] = ()
    tags: bool = False
    max_pixels: int | None = None
    as_rgb: bool = False
    literals: tuple[str, ...] = ()
    folder_flag: str | None = "--image_folder"

    def arranged(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """The row with a placeholder part for each of its pictures, and the pictures' sources in that order.

        PictureError: the number of pictures differs from that of the placeholders, or the row has other media.
        """
        row = dict(row)
        given = [listed(row.pop(name, None)) for name in COLUMNS]
        own = given[0] or given[1]
        reader = _Reader(own, tags=self.tags)
        turns = [name for name in TURNS if isinstance(row.get(name), list)]
        for name in turns:
            row[name] = [reader.message(message) for message in row[name]]
            self._refuse_literals(row[name])
        if turns and not reader.placeholders and own:
            first = next((name for name in turns if name in ("messages", "prompt")), turns[0])
            row[first] = _with_pictures_first(row[first], len(own))
        elif turns and reader.placeholders != len(reader.sources) + len(own) - reader.used:
            raise PictureError(
                f"{count_of(len(own), 'picture')} for {count_of(reader.wanted, 'placeholder')}: give a picture for "
                "each placeholder, in their order",
                kind="count",
            )
        sources = reader.sources + own[reader.used :]
        if any(_placeholders(row[name]) for name in turns if name not in ("messages", "prompt")):
            raise PictureError(
                "a picture stands in the answer, which is not trained: put it into the prompt", kind="answer"
            )
        row["images"] = sources
        return row, sources

    def _refuse_literals(self, messages: Sequence[Any]) -> None:
        for text in _texts(messages):
            for literal in self.literals:
                if literal in text:
                    raise PictureError(
                        f"its text contains {literal}, which the model reads as the placeholder of a picture: write "
                        "it otherwise",
                        kind="literal",
                    )

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row as TRL's collators read it, with its pictures opened."""
        row, sources = self.arranged(row)
        row["images"] = [self.opened(source) for source in sources]
        return row

    def opened(self, source: Any) -> Image:
        """One picture, decoded, upright and within ``max_pixels``.

        PictureError: it is missing, damaged, no picture, too large, or 16-bit grey.
        """
        from PIL import Image, ImageOps

        name = name_of(source)
        image = self.header(source)
        try:
            image.load()
            image = ImageOps.exif_transpose(image)
        except Exception as error:  # Pillow's decoders raise errors of many classes for damaged files
            raise PictureError(
                f"{name} is cut off or damaged ({_first_line(error)}): save it again, or leave the row out",
                kind="damaged",
                picture=name,
            ) from error
        if self.as_rgb or isinstance(source, str) or image.mode not in ("RGB", "RGBA", "LA", "P", "PA"):
            image = image.convert("RGB")  # as transformers opens a path
        width, height = image.size
        if self.max_pixels is not None and width * height > self.max_pixels:
            factor = (self.max_pixels / (width * height)) ** 0.5
            size = (max(1, int(width * factor)), max(1, int(height * factor)))
            mode = "RGB" if image.mode == "P" else image.mode
            image = image.convert(mode).resize(size, Image.Resampling.BICUBIC)
        return image

    def header(self, source: Any) -> Image:
        """One picture whose pixels are not decoded yet; what its header shows to be unusable is refused."""
        from PIL import Image, UnidentifiedImageError

        name = name_of(source)
        if isinstance(source, Image.Image):
            image = source
        else:
            stream, begins = self._stream(source, name)
            try:
                image = Image.open(stream)
            except Image.DecompressionBombError as error:
                raise PictureError(
                    f"{name} is refused as a decompression bomb ({_first_line(error).rpartition(',')[0]}): make it "
                    "smaller, or leave the row out",
                    kind="bomb",
                    picture=name,
                ) from error
            except UnidentifiedImageError as error:
                raise PictureError(
                    f"{name} is no picture that Pillow can read; it begins with {begins!r}",
                    kind="unknown",
                    picture=name,
                ) from error
            except Exception as error:
                raise PictureError(
                    f"{name} is cut off or damaged ({_first_line(error)}): save it again, or leave the row out",
                    kind="damaged",
                    picture=name,
                ) from error
        if image.mode in _GREY_16:
            raise PictureError(
                f"{name} has more than 8 bits of grey, which models read as white: convert it to 8 bits, in the range "
                "that matters, with `mogrify -auto-level -depth 8 FILE`",
                kind="grey",
                picture=name,
            )
        return image

    def _stream(self, source: Any, name: str) -> tuple[Any, bytes]:
        """The bytes of a picture as a file, and how they begin."""
        if not isinstance(source, str | bytes | Mapping):
            raise PictureError(
                f"a picture is given as {source!r}: give its path, its address or its bytes", kind="no source"
            )
        content = _embedded(source, name)
        if content is None:
            path = self._path(_address(source), name)
            try:
                content = path.read_bytes()
            except OSError as error:
                raise PictureError(f"{name} cannot be read: {error.strerror}", kind="missing", picture=name) from error
        if not content:
            raise PictureError(f"{name} is empty (0 bytes)", kind="empty", picture=name)
        return io.BytesIO(content), content[:16]

    def _path(self, text: str, name: str) -> Path:
        if not text:
            raise PictureError("a picture has neither bytes nor a path", kind="missing", picture=name)
        if text.startswith(("http://", "https://")):
            return _fetched(text)
        if "://" in text and not text.startswith("file://"):
            raise PictureError(
                f"{name} cannot be fetched, only http:// and https:// can: download the picture and name the file",
                kind="scheme",
                picture=name,
            )
        plain = text.removeprefix("file://localhost").removeprefix("file://")
        path = expand_user(plain)
        if text.startswith("file://") and not os.path.exists(path):
            path = Path(unquote(plain))
        tried = [path]
        if not path.is_absolute():
            tried = [folder / path for folder in (*self.folders, Path.cwd())]
        files = [candidate for candidate in tried if os.path.isfile(candidate)]  # unlike Path.is_file, never raises
        for other in files[1 : len(self.folders)]:
            if not filecmp.cmp(files[0], other, shallow=False):
                raise PictureError(
                    f"{name} is another picture in {files[0].parent} than in {other.parent}: write whole paths, or "
                    "give other names",
                    kind="two files",
                    picture=name,
                )
        if files:
            return files[0]
        if any(os.path.isdir(candidate) for candidate in tried):
            raise PictureError(f"{name} is a folder, and no picture", kind="folder", picture=name)
        raise self._missing(path, name)

    def _missing(self, path: Path, name: str) -> PictureError:
        where = ""
        hint = ""
        if not path.is_absolute():
            folders = self.folders or (Path.cwd(),)
            where = f" in {', '.join(str(folder) for folder in folders)}"
            if self.folder_flag:
                hint = f": give the folder of the pictures with {self.folder_flag}"
        return PictureError(f"{name} does not exist{where}{hint}", kind="missing", picture=name)


# ---- the parts of a row -----------------------------------------------------------------------------------------


class _Reader:
    """Reads the messages of one row in order: each placeholder takes its own picture, or the row's next one."""

    def __init__(self, own: Sequence[Any], *, tags: bool) -> None:
        self._own = own
        self._tags = tags
        self.sources: list[Any] = []
        self.used = 0  # of the row's own pictures
        self.wanted = 0  # placeholders without a picture of their own
        self.placeholders = 0

    def message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        content = message.get("content")
        if isinstance(content, str) and self._tags and TAG in content and message.get("role") != "assistant":
            return {**message, "content": list(self._split(content))}
        if isinstance(content, list):
            return {**message, "content": [self._part(part) for part in content]}
        return message

    def _split(self, text: str) -> Iterator[dict[str, Any]]:
        for number, piece in enumerate(text.split(TAG)):
            if number:
                self._take()
                yield {"type": "image"}
            if piece:
                yield {"type": "text", "text": piece}

    def _part(self, part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        part = {key: value for key, value in part.items() if value is not None}  # Arrow gives all parts the same keys
        kind = part.get("type")
        if kind in OTHER_MEDIA:
            raise PictureError(f"a part of a message is {kind}; only text and pictures are trained", kind="media")
        if kind not in PICTURE_PARTS:
            return {"type": "text", "text": "", **part} if kind == "text" else part
        payload = next((part[key] for key in _PAYLOADS if part.get(key) not in (None, "")), None)
        if payload is None:
            self._take()
        else:
            self.placeholders += 1
            self.sources.append(payload)
        return {"type": "image"}

    def _take(self) -> None:
        self.placeholders += 1
        self.wanted += 1
        if self.used < len(self._own):
            self.sources.append(self._own[self.used])
            self.used += 1


def listed(value: Any) -> list[Any]:
    """The pictures of a column's value: a list, also of lists, a single picture, or nothing."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        pictures: list[Any] = []
        for inner in value:
            pictures += listed(inner)
        return pictures
    if value == "":
        return []
    return [value]


def _with_pictures_first(messages: list[Any], count: int) -> list[Any]:
    """The messages with ``count`` pictures before the text of the first user message, as TRL places them."""
    placeholders = [{"type": "image"} for _ in range(count)]
    for number, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
            return [*messages[:number], {**message, "content": placeholders + parts}, *messages[number + 1 :]]
    raise PictureError("its pictures have no place: no message is of the role user", kind="count")


def _texts(messages: Sequence[Any]) -> Iterator[str]:
    """The text of all messages, part by part."""
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part
            if isinstance(part, Mapping):
                text = part.get("text")
            if isinstance(text, str):
                yield text


def _placeholders(messages: Sequence[Any]) -> int:
    count = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            continue
        for part in content:
            if isinstance(part, Mapping) and part.get("type") == "image":
                count += 1
    return count


# ---- the bytes of a picture -------------------------------------------------------------------------------------


def name_of(source: Any) -> str:
    """How messages name a picture: its path or address, or what it is."""
    if isinstance(source, Mapping):
        inner = next((source[key] for key in ("path", "url") if source.get(key)), None)
        if inner is not None:
            return name_of(inner)
        content = source.get("bytes") or source.get("data") or b""
        return f"a picture of {len(content):,} bytes in the data file"
    if not isinstance(source, str):
        return "a picture in the data file"
    if source.startswith("data:"):
        return f"a picture in the text of {len(source):,} characters"
    if len(source) > _NAME_LENGTH:
        return f"{source[: _NAME_LENGTH // 2]}... ({len(source):,} characters)"
    return source


def _address(source: Any) -> str:
    if isinstance(source, Mapping):
        return str(source.get("path") or source.get("url") or "")
    return str(source)


def _embedded(source: Any, name: str) -> bytes | None:
    """The bytes of a picture that the row itself holds; None: they are elsewhere."""
    if isinstance(source, bytes):
        return source
    written = False  # as base64, whatever it looks like
    if isinstance(source, Mapping):
        if source.get("bytes") is not None:
            return bytes(source["bytes"])
        written = bool(source.get("data"))
        source = source.get("data") or source.get("url") or ""  # Anthropic's and OpenAI's
        if isinstance(source, bytes):
            return source
    if isinstance(source, str) and source.startswith("data:"):
        source = source.partition(",")[2]
    elif not (written or (isinstance(source, str) and len(source) > 255 and "://" not in source[:16])):
        return None  # longer than a file's name
    packed = "".join(str(source).split()).translate(_URL_SAFE).rstrip("=")
    try:
        return base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"{name} is no base64 of a picture ({error})", kind="unknown", picture=name) from error


def _fetched(address: str) -> Path:
    """The file of a picture at an address, which is fetched once and kept in the cache."""
    import urllib.request
    from http.client import HTTPException

    from huggingface_hub import constants

    cache = Path(constants.HF_HOME) / "hf_rocm_tune" / "pictures"
    file = cache / hashlib.sha256(address.encode()).hexdigest()
    if file.is_file():
        return file
    try:
        with urllib.request.urlopen(address, timeout=_ADDRESS_SECONDS) as answer:
            content = answer.read()
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or _first_line(error)
        raise PictureError(
            f"{address} cannot be fetched ({reason}): download the picture and name the file",
            kind=f"address of {urlparse(address).hostname}",
            picture=address,
        ) from error
    why = unwritable("pictures")
    if why:
        raise UsageError(f"{address} cannot be kept, for the cache {why}")
    cache.mkdir(parents=True, exist_ok=True)
    begun = file.with_suffix(f".{os.getpid()}")
    begun.write_bytes(content)
    begun.replace(file)
    return file


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---- a data set -------------------------------------------------------------------------------------------------


def undecoded(rows: Rows) -> Rows:
    """The rows with their pictures as bytes or paths; nothing is copied."""
    from datasets import Dataset, Image, List

    kinds = {name: kind for name, kind in (rows.features or {}).items() if name in COLUMNS}
    if not isinstance(rows, Dataset):
        for name, kind in kinds.items():
            if isinstance(kind, Image) or isinstance(getattr(kind, "feature", None), Image):
                plain: Any = Image(decode=False)
                if not isinstance(kind, Image):
                    plain = List(plain)
                rows = rows.cast_column(name, plain)
        return rows
    rows = copy.deepcopy(rows)  # shares the table; `cast_column` would write a list of pictures once more
    for name in kinds:
        kind = rows.info.features[name]
        image = kind if isinstance(kind, Image) else getattr(kind, "feature", None)
        if isinstance(image, Image):
            image.decode = False
    return rows


def with_column(rows: Rows) -> Rows:
    """The rows with a column ``images``, by which TRL knows them; it is empty where pictures are in messages."""
    from datasets import Dataset, Features, List, Value

    if any(name in columns_of(rows) for name in COLUMNS):
        return rows
    if isinstance(rows, Dataset):
        empty: list[list[str]] = [[]] * len(rows)
        return rows.add_column("images", empty, feature=List(Value("string")))
    features = Features({**rows.features, "images": List(Value("string"))}) if rows.features else None
    return rows.map(lambda row: {"images": []}, features=features)


def tagged(rows: Rows) -> bool:
    """Whether ``<image>`` in the texts of these rows stands for their pictures, as LLaVA and LLaMA-Factory write it.

    UsageError: it does so in some of the rows with pictures only.
    """
    from datasets import Dataset

    columns = columns_of(rows)
    pictures = next((name for name in COLUMNS if name in columns), None)
    texts = [name for name in TURNS if name in columns]
    if pictures is None or not texts:
        return False
    chosen = rows.select_columns([pictures, *texts]) if isinstance(rows, Dataset) else rows.take(STREAMED_ROWS)
    first_with = first_without = None
    for number, row in enumerate(chosen, start=1):
        if not listed(row[pictures]):
            continue
        contents: list[Any] = []
        for name in texts:
            if isinstance(row[name], list):
                contents += [message.get("content") for message in row[name]]
        if any(isinstance(content, list) for content in contents):
            continue
        if any(isinstance(content, str) and TAG in content for content in contents):
            first_with = first_with or number
        else:
            first_without = first_without or number
    if first_with and first_without:
        raise PictureError(
            f"row {first_with} has {TAG} in its text and row {first_without} has pictures without it: write {TAG} "
            "where each picture belongs, in every row, or in none (then they come first)",
            kind="count",
        )
    return first_with is not None
