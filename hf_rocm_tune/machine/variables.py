"""Environment variables that harm, hinder or do nothing: kept as the user set them, and named before torch is imported.

A healthy gfx1100 with a matching wheel needs none, so nothing is set but the choice of visible cards (`process`).
Where a rule depends on something unknown (torch's build, the GPUs), an error becomes a warning. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.process import FILTERS
from hf_rocm_tune.machine.sources import links_of
from hf_rocm_tune.redaction import one_line

Spec = TypeVar("Spec")
Action = Literal["set", "keep", "info", "warn", "error"]

_MARK_PRINTED = "HF_ROCM_TUNE_TOLD"
_ORDER: Sequence[Action] = ("error", "warn", "set", "info", "keep")
_LABEL: Mapping[Action, str] = {"error": "error", "warn": "warning", "info": "note"}
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In the order in which torch 2.13 reads them: the first that is set wins (CUDAAllocatorConfig.h)."""


@dataclass(frozen=True)
class MachineFacts:
    """Facts that rules depend on; None: unknown, for the reasons in ``why``."""

    is_rocm: bool | None  # torch's build
    archs: tuple[str, ...] | None  # of the visible GPUs, in order
    why: str = ""


def package_directory(package: str) -> Path | None:
    """The directory of an installed package, without importing it; None if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a half-made module in sys.modules has no spec
        return None
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin).parent


def read_torch_file() -> tuple[dict[str, str | None], str]:
    """What ``torch/version.py`` assigns to ``__version__``, ``hip``, ``cuda``; or nothing, and why."""
    directory = package_directory("torch")
    if directory is None:
        return {}, "torch is not installed"
    try:
        text = (directory / "version.py").read_text("utf-8", errors="replace")
    except OSError as error:
        return {}, f"torch/version.py: {error.strerror}"
    stated = re.findall(r"^(__version__|hip|cuda)\b[^=\n]*(?:=\s*['\"]([^'\"]+)['\"])?", text, re.MULTILINE)
    versions = {name: value or None for name, value in stated}
    if not versions.get("__version__"):
        return {}, "torch/version.py has another form than expected"
    return versions, ""


def read_facts(archs: tuple[str, ...] | None, why: str = "") -> MachineFacts:
    """The facts, with torch's build read without importing it."""
    stated, reason = read_torch_file()
    if "hip" in stated:
        return MachineFacts(stated["hip"] is not None, archs, why)
    reason = reason or "torch/version.py does not tell the build"
    if why:
        reason = f"{reason}; {why}"
    return MachineFacts(None, archs, reason)


# ---- the policy ---------------------------------------------------------------------------------------------------


def _options(value: str) -> dict[str, str]:
    """``expandable_segments:True,max_split_size_mb:512`` as lower-case names and values."""
    pairs = (part.partition(":") for part in value.lower().split(","))
    return {name.strip(): setting.strip() for name, _, setting in pairs if name.strip()}


def _expandable(value: str, facts: MachineFacts | None = None) -> bool:
    return _options(value).get("expandable_segments") == "true"


def _off(value: str, facts: MachineFacts) -> bool:
    return value.strip().lower() in ("0", "false", "off", "no")


def _on(value: str, facts: MachineFacts) -> bool:
    return not _off(value, facts)


def _own_arch(value: str, facts: MachineFacts) -> bool:
    """Whether an override names the architecture that all visible GPUs are known to have: 11.0.0 is gfx1100."""
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){2}", value.strip()):
        return False
    major, minor, stepping = map(int, value.split("."))
    return set(facts.archs or ()) == {f"gfx{major}{minor:x}{stepping:x}"}


def _same_instructions(value: str, facts: MachineFacts) -> bool:
    """Whether RDNA2 GPUs are to run gfx1030's code, whose instructions all of them have (LLVM: gfx10-3-generic)."""
    archs = facts.archs or ()
    return value.strip() == "10.3.0" and bool(archs) and all(re.fullmatch("gfx103[0-9]", arch) for arch in archs)


def _other_arch(value: str, facts: MachineFacts) -> bool | None:
    return None if facts.archs is None else not _own_arch(value, facts)


@dataclass(frozen=True)
class Rule:
    """One rule: the first of a variable that applies decides."""

    names: str  # separated by spaces; a * stands for any rest of a name that is not empty
    action: Action
    reason: str
    fix: str
    source: str
    when: Callable[[str, MachineFacts], bool | None] = lambda value, facts: True  # applies to a value; None: unknown
    rocm: bool = True  # only if torch is a ROCm build

    def covers(self, variable: str) -> bool:
        return any(fnmatchcase(variable, pattern.replace("*", "?*")) for pattern in self.names.split())

    def applies(self, value: str, facts: MachineFacts) -> bool | None:
        conditions = (facts.is_rocm if self.rocm else True, self.when(value, facts))
        if False in conditions:
            return False
        if None in conditions:
            return None
        return True


_ALLOCATOR = " ".join(ALLOCATOR)
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION HSA_OVERRIDE_GFX_VERSION_*"

RULES = (
    Rule(_ALLOCATOR, "error",
         "expandable_segments:True with max_split_size_mb: live tensors read back as zeros on an RX 7900 XT, and "
         "reserved memory grew until the card was full (gfx1201); both were reported",
         "unset both", "ROCm/ROCm#6603; pytorch#193400",
         lambda value, facts: _expandable(value) and "max_split_size_mb" in _options(value)),
    Rule(_ALLOCATOR, "error",
         "the asynchronous allocator backend gave zeroed buffers (gfx1030) and crashes (gfx1100) on ROCm",
         "remove backend: the native allocator is the default", "ROCm/ROCm#6178; rocm-systems#10943",
         lambda value, facts: _options(value).get("backend") in ("cudamallocasync", "hipmallocasync")),
    Rule(_ALLOCATOR, "warn",
         "expandable_segments:True uses HIP virtual memory, with which zeroed tensors, NaN in training (gfx1201), "
         "hangs and crashes were reported; whether it is safe by itself on gfx1100 is unknown",
         "unset it", "ROCm/ROCm#6603; pytorch#192259; pytorch#187343; pytorch#195202; rocm-systems#11693", _expandable),
    Rule("PYTORCH_NO_HIP_MEMORY_CACHING PYTORCH_NO_CUDA_MEMORY_CACHING", "warn",
         "disables the caching allocator: very slow, and *_ALLOC_CONF has no effect",
         "unset it: it is for debugging only", "pytorch hip.rst", rocm=False),
    Rule(_OVERRIDE, "info",
         "the visible GPUs have this version already: no effect here, but any other GPU would be reported as one",
         "unset it", "libhsakmt topology.c; unsloth install.sh", _own_arch),
    Rule(_OVERRIDE, "info",
         "the visible GPUs run gfx1030's code, whose instructions they have; AMD does not support it",
         "nothing to do; unset it once torch has code of their own", "LLVM AMDGPUUsage; legacy-rocm-build#1698",
         _same_instructions),
    Rule(_OVERRIDE, "error",
         "GPUs are reported with another architecture than they have: code for the wrong one crashes or is wrong",
         "unset it", "libhsakmt topology.c; TheRock#5543", _other_arch),
    Rule("AMD_SERIALIZE_KERNEL AMD_SERIALIZE_COPY HIP_LAUNCH_BLOCKING", "warn",
         "serialises kernels or copies for debugging: slow, and may hide a race condition",
         "unset it for training", "clr flags.hpp", _on),
    Rule("HSA_ENABLE_SDMA HSA_ENABLE_PEER_SDMA", "info",
         "copies run as kernels, not on the copy engines, and cost bandwidth and overlap: a diagnostic, not a fix",
         "unset it, except to compare the two", "rocr flag.h; rocm-systems#10943", _off),
    Rule("HIP_FORCE_DEV_KERNARG", "info",
         "not a memory setting: on gfx1100, kernel arguments are written through the BAR",
         "unset it while searching for a cause of corruption", "clr rocsettings.cpp", _on),
    Rule("HSA_ENABLE_IPC_MODE_LEGACY", "warn",
         "hipIpcGetMemHandle was reported to fail with it; some container images set it",
         "unset it, or set it to 0", "rocm-systems#2209", _on),
    Rule("BNB_ROCM_VERSION", "info",
         "bitsandbytes loads its library for that ROCm version, whatever version is installed",
         "unset it if bitsandbytes has a library for your ROCm version", "bitsandbytes cextension.py"),
    # Names that nothing reads, in guides of earlier years. RCCL's source reads NCCL_* (rccl param.h).
    Rule("RCCL_ALGO RCCL_BUFFSIZE RCCL_DEBUG RCCL_DEBUG_* RCCL_IB_* RCCL_NCHANNELS RCCL_*_NCHANNELS "
         "RCCL_NET_GDR_LEVEL RCCL_NTHREADS RCCL_P2P_DISABLE RCCL_P2P_LEVEL RCCL_PROTO RCCL_SHM_DISABLE RCCL_SOCKET_* "
         "RCCL_TOPO_FILE HCCL_* *_TREE_THRESHOLD *_RING_THRESHOLD", "info",
         "unknown to RCCL, ignored: it reads NCCL_* names (NCCL_DEBUG, NCCL_MAX_NCHANNELS, NCCL_ALGO)",
         "set the NCCL_* name if you want it", "rccl param.h; RCCL environment variables page"),
    Rule("HIP_DISABLE_IPC PYTORCH_ROCM_DEVICE HSA_UNALIGNED_ACCESS_MODE", "info",
         "unknown to HIP, ROCR and torch, ignored", "unset it (HIP_VISIBLE_DEVICES chooses cards)",
         "rocr flag.h; clr flags.hpp"),
)  # fmt: skip

# Real names without a rule; names whose value is code to load (NCCL_NET_PLUGIN, HSA_TOOLS_LIB) stay out.
PLAIN = (
    "NCCL_ALGO NCCL_BUFFSIZE NCCL_DEBUG NCCL_IB_DISABLE NCCL_MAX_NCHANNELS NCCL_NET_GDR_LEVEL NCCL_P2P_DISABLE "
    "NCCL_PROTO NCCL_SOCKET_IFNAME RCCL_LL128_FORCE_ENABLE RCCL_LOG_LEVEL RCCL_MSCCL_ENABLE RCCL_P2P_NET_DISABLE "
    "HSA_FORCE_FINE_GRAIN_PCIE HSA_NO_SCRATCH_RECLAIM PAL_HIP_IPC_FLAG MIOPEN_CUSTOM_CACHE_DIR MIOPEN_DISABLE_CACHE "
    "MIOPEN_ENABLE_LOGGING MIOPEN_LOG_LEVEL MIOPEN_USER_DB_PATH PYTORCH_TUNABLEOP_ENABLED TORCH_BLAS_PREFER_HIPBLASLT "
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL FLASH_ATTENTION_TRITON_AMD_ENABLE TORCH_CUDA_SANITIZER OMP_NUM_THREADS "
    "KMP_AFFINITY"
)


def covers(name: str) -> bool:
    """Whether a recipe may set it."""
    return name in FILTERS or name in PLAIN.split() or any(rule.covers(name) for rule in RULES)


@dataclass(frozen=True)
class Decision:
    """What was decided on one variable, or found of it."""

    variable: str  # or several, with commas
    action: Action  # all but set keep the user's value
    value: str | None  # None if unset
    reason: str
    source: str  # issues and documents, separated by semicolons
    fix: str = ""

    @property
    def assignment(self) -> str:
        """``NAME=value`` as one line of printable text, of at most 200 letters."""
        text = self.variable
        if self.value is not None:
            text += f"={self.value}"
        return one_line(text)[:200]


DECISIONS: list[Decision] = []
"""The decisions of this process, each once."""
_FACTS: list[MachineFacts] = []  # of the last `review`


# Variables of which only one should be set.
_TOGETHER = (
    (ALLOCATOR, "different values: torch 2.13 reads only the first that is set, in the order CUDA, HIP, ALLOC_CONF",
     "torch CUDAAllocatorConfig.h; pytorch#167659"),
    (FILTERS, "these filters are nested: HIP applies the first of HIP_ and CUDA_VISIBLE_DEVICES, and counts from 0 "
     "among the GPUs that ROCR_VISIBLE_DEVICES leaves", "HIP environment variables page; clr flags.hpp"),
)  # fmt: skip


def evaluate(environ: Mapping[str, str], facts: MachineFacts) -> list[Decision]:
    """What the policy finds in ``environ``. Changes nothing."""
    made = []
    for names, reason, source in _TOGETHER:
        given = {name: environ[name] for name in names if name in environ}
        alternatives = {*given}
        if names is ALLOCATOR:  # the same value under several names does no harm
            alternatives = {value.strip() for value in given.values()}
        if len(alternatives) > 1:
            values = " | ".join(given.values())
            made.append(Decision(", ".join(given), "warn", values, reason, source, "set one of them"))
    for name, value in environ.items():
        if not value.strip():
            continue
        for rule in RULES:
            applies = rule.covers(name) and rule.applies(value, facts)
            if applies is False:
                continue
            action, reason = rule.action, rule.reason
            if applies is None:
                reason = f"{reason} [uncertain here: {facts.why}]"
                if action == "error":
                    action = "warn"
            made.append(Decision(name, action, value, reason, rule.source, rule.fix))
            break
    return made


def too_late(decision: Decision) -> Decision:
    """The decision if torch has been imported already: nothing is set."""
    reason = f"too late to set {decision.value}: torch was imported before hf_rocm_tune ({decision.reason})"
    fix = "import hf_rocm_tune first, or set it in the shell"
    return replace(decision, action="warn", value=None, reason=reason, fix=fix)


def remember(decisions: Iterable[Decision]) -> None:
    DECISIONS.extend(decision for decision in dict.fromkeys(decisions) if decision not in DECISIONS)


def review(facts: MachineFacts | None = None) -> list[Decision]:
    """Evaluate ``os.environ``, by the facts of the last call unless given, and append the decisions to `DECISIONS`."""
    _FACTS[:] = [facts or (_FACTS[0] if _FACTS else read_facts(None, "the visible GPUs were not read"))]
    made = evaluate(os.environ, _FACTS[0])
    remember(made)
    return made


# ---- what is printed ----------------------------------------------------------------------------------------------


def announce(decisions: Iterable[Decision], environ: MutableMapping[str, str] | None = None) -> None:
    """Print info (unless HF_ROCM_TUNE_QUIET=1), warnings and errors on stderr, each once per tree of processes."""
    environ = os.environ if environ is None else environ
    if environ.get("LOCAL_RANK", "").strip() not in ("", "0", "-1"):
        return
    quiet = environ.get("HF_ROCM_TUNE_QUIET", "").strip() == "1"
    printed = [mark for mark in environ.get(_MARK_PRINTED, "").split(",") if mark]
    for decision in decisions:
        if decision.action not in _LABEL or (quiet and decision.action == "info"):
            continue
        fix = f"; {decision.fix}" if decision.fix else ""
        line = f"{_LABEL[decision.action]}: {decision.assignment}: {decision.reason}{fix} ({decision.source})"
        mark = f"{zlib.crc32(line.encode('utf-8', 'surrogateescape')):08x}"
        if mark not in printed:
            printed.append(mark)
            print(f"hf_rocm_tune: {line}", file=sys.stderr)
    if printed:
        environ[_MARK_PRINTED] = ",".join(printed)


def explain(decisions: Iterable[Decision]) -> str:
    """A table, the most severe first: action, variable and value, then reason, fix and source."""
    lines = []
    for decision in sorted(decisions, key=lambda decision: _ORDER.index(decision.action)):
        entry = [f"{decision.action:<6}{decision.assignment}", decision.reason]
        if decision.fix:
            entry.append(f"fix: {decision.fix}")
        entry += [f"source: {decision.source}", *links_of(decision.source)]
        lines.append("\n      ".join(entry))
    return "\n".join(lines) or "No variable was set, and no existing one needs a change."


# ---- variables of our own that inject faults --------------------------------------------------------------------


def read_spec(
    spec: type[Spec],
    variable: str,
    text: str,
    *,
    allowed: Mapping[str, Sequence[str]],
    least: Mapping[str, int],
    required: Mapping[str, str] | None = None,
) -> Spec:
    """A dataclass of faults from ``key=value`` pairs joined by commas, a key for each field; raises UsageError.

    ``allowed``: the values of a key of text; ``least``: the least value of a key of a number; ``required``: mandatory
    keys and what is expected of them, ``kind`` unless given. A bool is 0 or 1, a float is from 0 to 1.
    """
    hints = get_type_hints(spec)
    values: dict[str, Any] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        key, separator, value = (piece.strip() for piece in item.partition("="))
        if not separator or key not in hints or key in values:
            what = f"'{key}' is given twice" if key in values else f"'{item}' is not understood"
            raise UsageError(f"{variable}: {what}; valid keys: {' '.join(hints)}")
        allowed_types = (hints[key], *get_args(hints[key]))  # of ``int | None`` both
        kind: Any = next(type_ for type_ in (bool, float, int, str) if type_ in allowed_types)
        low = least.get(key, 0)
        choices = allowed.get(key, ())
        expected = {bool: "0 or 1", float: "a number from 0 to 1", int: f"a whole number from {low} on"}
        try:
            given = int(value) if kind is bool else kind(value)
        except ValueError:
            right = False
        else:
            if kind is str:
                right = not choices or given in choices
            else:
                right = low <= given and (kind is int or given <= 1)
        if not right:
            wanted = expected.get(kind, f"one of {' '.join(choices)}")
            raise UsageError(f"{variable}: {key}={value} is not valid; expected {wanted}")
        values[key] = kind(given)
    for key, wanted in (required or {"kind": f"kind= one of {' '.join(allowed.get('kind', ()))}"}).items():
        if key not in values:
            raise UsageError(f"{variable}: '{key}' is missing; give {wanted}")
    return spec(**values)
