"""Files that others wrote: adapters, models, manifests, reports, run records, recipes, data cards.

Whoever made such a file may want harm. So each is read here, with a limit on its size and its depth, never waiting for
a pipe, and every name of a file in one passes `checked_name` when it is read, and `file_in` when it is used. What is
refused is an ``OSError`` or a ``ValueError`` that says why; the caller names the file and says what to do.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import stat
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any, ClassVar

import yaml

from hf_rocm_tune.errors import UsageError

LARGEST_BYTES = 16 << 20
"""Most bytes of a file without a limit of its own in `LARGEST`."""
LARGEST = {
    "integrity.json": 64 << 20,  # an entry for each tensor
    "model.safetensors.index.json": 64 << 20,
    "run.json": 16 << 20,
    "transfer_report.json": 64 << 20,
    "training_log.json": 512 << 20,  # a row for each logged step
    "trainer_state.json": 512 << 20,
    "attested_files.json": 512 << 20,  # an entry for each tensor of each model
}
"""Most bytes of a file by its name."""
DEEPEST = 64
"""Most levels of nested lists and objects."""
MOST_NODES = 100_000
"""Most values in a YAML file, with each alias counted as what it stands for."""
LONGEST_NAME = 1024
_LONGEST_PART = 255  # bytes, of the file systems of Linux
_HUB_FOLDERS = ("models--", "datasets--", "spaces--")


def read_bytes(path: Path) -> bytes:
    """The content of a plain file, or of one that a link names, within its limit."""
    most = LARGEST.get(path.name, LARGEST_BYTES)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no plain file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most >> 20} MiB")
    return content


def read_text(path: Path) -> str:
    return read_bytes(path).decode("utf-8")


def read_json(path: Path) -> Any:
    """The value of a JSON file whose texts can be encoded and whose depth is within `DEEPEST`."""
    return parse_json(read_bytes(path))


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, got {type(content).__name__}")
    return content


def parse_json(content: str | bytes) -> Any:
    """A JSON value whose texts can be encoded and whose depth is within `DEEPEST`."""
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    check_value(value)
    return value


def check_value(value: Any) -> None:
    """Refuse nested mappings and lists deeper than `DEEPEST`, and texts that are no Unicode (half of a pair)."""
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
        for text in level:
            if isinstance(text, str) and not text.isascii():
                text.encode()  # a UnicodeError is a ValueError
        inside: list[Any] = []
        for container in level:
            if isinstance(container, Mapping):
                inside += [*container.keys(), *container.values()]
            elif isinstance(container, list | tuple):
                inside += container
        level, depth = inside, depth + 1


def check_printable(value: Any) -> None:
    """Refuse control characters in any text of a nested value, such as a terminal's escape sequences."""
    level = [value]
    while level:
        value = level.pop()
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"it has control characters: {value[:80]!r}")
        if isinstance(value, Mapping):
            level += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            level += value


def visible(text: str, *, json_text: bool = False) -> str:
    r"""A text for a terminal: control and format characters but line breaks and tabs as ``\x1b``, so that none acts;
    in JSON as ``\u001b``."""
    if text.isprintable():
        return text
    return "".join(letter if _is_shown(letter) else _escaped(letter, json_text=json_text) for letter in text)


def _is_shown(character: str) -> bool:
    """Whether a character takes room or breaks a line: joiners are in writing of several languages and in emoji."""
    return character in "\n\t\u200c\u200d" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escaped(character: str, *, json_text: bool) -> str:
    number = ord(character)
    if json_text:
        return json.dumps(character)[1:-1] if number > 0xFF else f"\\u{number:04x}"
    if number < 0x100:
        return f"\\x{number:02x}"
    if number < 0x10000:
        return f"\\u{number:04x}"
    return f"\\U{number:08x}"


_COUNT = re.compile(r"(layers?|experts?|blocks?|depths?|heads?|stages?)$")
MOST_PARTS = 1 << 16
"""Most layers, experts or heads that a model's configuration may state: models have hundreds."""


def check_counts(configuration: Any) -> None:
    """Refuse a model's configuration that states absurdly many layers, experts or heads, at any depth."""
    level = [configuration]
    while level:
        part = level.pop()
        if isinstance(part, Mapping):
            for key, value in part.items():
                if isinstance(value, int | float) and value > MOST_PARTS and _COUNT.search(str(key)):
                    raise ValueError(f"it states {key} {value:,}, more than any model has")
            level += part.values()
        elif isinstance(part, list):
            level += part


# ---- names of files -------------------------------------------------------------------------------------------------


class RefusedName(ValueError):
    """A name of a file that leads out of its directory, or that would act on a terminal."""


def checked_name(name: object) -> str:
    """A name of a file that another file states: relative, normal, within its directory, and printable.

    Raises:
        RefusedName: it is not.
    """
    if not isinstance(name, str) or not name:
        raise RefusedName(f"it names no file: {name!r:.80}")
    if not name.isprintable() or "\\" in name:
        raise RefusedName(f"it names a file with control characters or backslashes: {name!r:.80}")
    parts = PurePosixPath(name).parts
    if len(name) > LONGEST_NAME or any(len(os.fsencode(part)) > _LONGEST_PART for part in parts):
        raise RefusedName(f"it names a file with a name that is too long: {name[:80]!r}...")
    if not parts or name.startswith("/") or ".." in parts or PurePosixPath(name).as_posix() != name:
        raise RefusedName(f"it names {name!r:.80}, which is no path within its directory")
    return name


def checked_names(names: Iterable[object]) -> list[str]:
    return [checked_name(name) for name in names]


def file_in(directory: Path, name: str) -> Path:
    """The plain file of that name in a directory: no link and no device, and no link on the way to it.

    The Hub's cache is made of links, so one from a snapshot into the blobs of the same repository counts as the file.

    Raises:
        RefusedName: it is none.
        OSError: it does not exist, or cannot be looked at.
    """
    path = directory
    for part in PurePosixPath(checked_name(name)).parts:
        path = path / part
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode) and not _is_blob(directory, path):
            raise RefusedName(f"{path.relative_to(directory)} is a link: replace it by the file itself")
    if not stat.S_ISREG(path.stat().st_mode):
        raise RefusedName(f"{name} is no plain file")
    return path


def _is_blob(directory: Path, path: Path) -> bool:
    """Whether a link in a snapshot of the Hub's cache leads to a blob of its own repository."""
    folders = Path(os.path.realpath(directory)).parents
    repository = next((folder for folder in folders if folder.name.startswith(_HUB_FOLDERS)), None)
    return repository is not None and Path(os.path.realpath(path)).parent == repository / "blobs"


# ---- regular expressions --------------------------------------------------------------------------------------------

PATTERN_SECONDS = 5.0
"""CPU time that the regular expressions of a foreign file may take in all; those of an adapter take milliseconds."""
_TICK_SECONDS = 0.1  # of this process's CPU time, all threads together


@contextmanager
def bounded_patterns() -> Iterator[None]:
    """Within the block, `re` raises a ``ValueError`` after `PATTERN_SECONDS` of CPU time in all.

    A matching that runs for good lets signals through, so a timer of CPU time looks what runs when it rings. It has no
    effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    spent, last = 0.0, time.thread_time()

    def ring(_number: int, frame: FrameType | None) -> None:
        nonlocal spent, last
        now = time.thread_time()
        spent += now - last if frame is not None and frame.f_code.co_filename == re.__file__ else 0.0
        last = now
        if spent > PATTERN_SECONDS:
            raise ValueError(f"its regular expressions take more than {PATTERN_SECONDS:.0f} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, _TICK_SECONDS, _TICK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)  # first: without a handler it would end the process
        signal.signal(signal.SIGVTALRM, before)


# ---- chat templates -------------------------------------------------------------------------------------------------

TEMPLATE_SECONDS = 5.0
"""CPU time that one rendering of a chat template may take; those of long conversations take milliseconds."""
_LARGEST_POWER = 1 << 12  # bits of a power, an exponent's or a product's operand
_LONGEST_REPEATED = 1 << 20  # items of a repeated or padded text or list
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{6,}|\*)")


def limit_templates() -> None:
    """From now on jinja2's sandbox, in which chat templates run, ends a rendering that takes too long, and refuses
    operations whose result is huge: powers, repeated texts and lists, wide fields.

    Time is watched in the main thread only; what a template collects piece by piece is not limited.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

    if issubclass(Sandbox.template_class, _limited_template()):
        return
    Sandbox.template_class = _limited_template()
    Sandbox.intercepted_binops = frozenset({"**", "*", "%"})  # which also keeps them from running when it is compiled
    Sandbox.call_binop = _checked_operation  # type: ignore[method-assign, assignment]
    Sandbox.call = _checked_call(Sandbox.call)  # type: ignore[method-assign]


@functools.cache
def _limited_template() -> Any:
    from jinja2 import Template

    class LimitedTemplate(Template):
        """A template whose rendering, also piece by piece, is limited in time."""

        def render(self, *arguments: Any, **keywords: Any) -> str:
            with _LimitedTime():
                return super().render(*arguments, **keywords)

        def generate(self, *arguments: Any, **keywords: Any) -> Iterator[str]:
            with _LimitedTime():
                yield from super().generate(*arguments, **keywords)

    return LimitedTemplate


class _LimitedTime:
    """Within the block a ``UsageError``, which nobody takes for a row's fault, is raised after so much CPU time of the
    main thread; other threads are not limited.

    A thread looks from time to time which block runs, and sends the main thread a signal when it is the same one for
    too long. A timer for each block would take longer than to render a short conversation, and one that is left running
    ends the process once Python has removed its handlers, or after an ``exec``.
    """

    _watched_thread: ClassVar[int | None] = None  # identifier of the main thread; None: nobody watches in this process
    _running: ClassVar[_LimitedTime | None] = None  # the block, of those inside one another the outer one
    _overdue: ClassVar[_LimitedTime | None] = None

    def __enter__(self) -> None:
        if threading.get_ident() != _LimitedTime._watched_thread and not self._begin_to_watch():
            return
        if _LimitedTime._running is None:
            _LimitedTime._running = self

    def __exit__(self, *_: object) -> None:
        if _LimitedTime._running is self:
            _LimitedTime._running = None

    @staticmethod
    def _begin_to_watch() -> bool:
        """Begin with the first block in the main thread; False: this is another thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        _LimitedTime._watched_thread = threading.get_ident()
        signal.signal(signal.SIGVTALRM, _LimitedTime._end_overdue)
        threading.Thread(target=_LimitedTime._watch, name="template-time", daemon=True).start()
        return True

    @staticmethod
    def _watch() -> None:
        thread = _LimitedTime._watched_thread
        assert thread is not None
        clock = time.pthread_getcpuclockid(thread)
        seen, since = None, 0.0
        while True:
            time.sleep(TEMPLATE_SECONDS / 10)
            running, now = _LimitedTime._running, time.clock_gettime(clock)
            if running is not seen:
                seen, since = running, now
            elif running is not None and now - since > TEMPLATE_SECONDS:
                _LimitedTime._overdue = running
                signal.pthread_kill(thread, signal.SIGVTALRM)

    @staticmethod
    def _end_overdue(*_: object) -> None:
        if _LimitedTime._running is not None and _LimitedTime._running is _LimitedTime._overdue:
            _LimitedTime._running = None  # also where the block ends at this very moment
            raise UsageError(
                f"the chat template takes more than {TEMPLATE_SECONDS:.0f} s of CPU time for one conversation: give "
                "another one (--chat_template_path), or another model"
            )

    @staticmethod
    def _forget() -> None:
        """In a process that was forked, where the thread that watches is not."""
        _LimitedTime._watched_thread = _LimitedTime._running = None


os.register_at_fork(after_in_child=_LimitedTime._forget)


def _checked_operation(sandbox: Any, _context: Any, operator: str, left: Any, right: Any) -> Any:
    from jinja2.exceptions import SecurityError

    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        huge = left.bit_length() * abs(right) > _LARGEST_POWER
    elif operator == "*":
        several, times = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(several, int) and isinstance(times, int):
            huge = several.bit_length() + times.bit_length() > _LARGEST_POWER
        else:
            huge = isinstance(times, int) and hasattr(several, "__len__") and len(several) * times > _LONGEST_REPEATED
    else:
        huge = isinstance(left, str) and _WIDTH.search(left) is not None
    if huge:
        raise SecurityError(f"the chat template asks for a huge value (operator {operator})")
    return sandbox.binop_table[operator](left, right)


def _checked_call(stock: Any) -> Any:
    from jinja2.exceptions import SecurityError

    def call(sandbox: Any, context: Any, called: Any, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; methods of texts get no huge width."""
        if isinstance(getattr(called, "__self__", None), str):
            given = (*arguments, *keywords.values())
            if any(isinstance(number, int) and abs(number) > _LONGEST_REPEATED for number in given):
                raise SecurityError("the chat template asks for a huge text")
        return stock(sandbox, context, called, *arguments, **keywords)

    return call


# ---- YAML -----------------------------------------------------------------------------------------------------------


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """A YAML document without types of its own, whose aliases do not stand for more than `MOST_NODES` values.

    Raises:
        yaml.YAMLError: it is not valid YAML.
        ValueError: it is too deep or too large.
    """
    reader = loader(text)
    try:
        node = reader.get_single_node()
        if node is None:
            return None
        _count_nodes(node)
        value = reader.construct_document(node)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    finally:
        reader.dispose()
    check_value(value)
    return value


def _count_nodes(node: yaml.Node) -> None:
    """Count what a document stands for; an alias is the same node again, and may lie within itself."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size_of(node: yaml.Node, depth: int) -> int:
        if depth > DEEPEST or id(node) in open_nodes:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            inside: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                for pair in node.value:
                    inside += pair
            elif isinstance(node, yaml.CollectionNode):
                inside += node.value
            sizes[id(node)] = 1 + sum(size_of(inner, depth + 1) for inner in inside)
            open_nodes.discard(id(node))
        if sizes[id(node)] > MOST_NODES:
            raise ValueError(f"it stands for more than {MOST_NODES:,} values (aliases of aliases)")
        return sizes[id(node)]

    size_of(node, 0)
