"""What all tests share: no network, no traces in the user's own caches, and no settings of the user's own."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.command import CommandServer

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports torch or a Hugging Face library, and inherited by the processes that tests start.
_HOME = tempfile.mkdtemp(prefix="hf-rocm-tune-tests-")
for _name in [name for name in os.environ if name.startswith(("HF_ROCM_TUNE_", "ACCELERATE_", "WANDB_"))]:
    del os.environ[_name]
os.environ.update(
    HF_HOME=_HOME,
    XDG_CACHE_HOME=_HOME,
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
)


def _has_room(memory: str) -> bool:
    """Whether a file system in memory takes what a whole run writes (2 GB), beside what it allocates."""
    try:
        found = os.statvfs(memory)
    except OSError:
        return False
    free = min(found.f_bavail * found.f_frsize, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return free > 6 << 30 and not found.f_flag & os.ST_NOEXEC and os.access(memory, os.W_OK)


# The commands under test wait for the disk at each save: there is none in memory.
if _has_room("/dev/shm"):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# A shell starts background jobs with Ctrl-C ignored, and what is ignored is inherited by all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So is SIGHUP under nohup. A handler that does nothing keeps this process going as well, and no program inherits it.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_unconfigure() -> None:
    """Remove the home directory that stood in for the user's."""
    shutil.rmtree(_HOME, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator, and torch sees none"))


@pytest.fixture(scope="module", autouse=True)
def _freeze_what_is_imported() -> None:
    """A training collects garbage more than once, and each time looks through all modules of all libraries: 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    """Runs commands in processes of their own. Its imports take 7 s: one for all rooms."""
    from tests.e2e.command import CommandServer

    started = CommandServer(tmp_path_factory.mktemp("commands"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The top directory of the repository."""
    return ROOT
