"""A Hub on loopback for a notebook's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_rocm_tune.lifecycle.launch import environment
from tests.publish.hub_server import TOKEN, loopback_hub


@contextmanager
def hub_in_environment() -> Iterator[None]:
    """Within the block, processes that are started find this Hub and its token in their environment. Without Xet."""
    with loopback_hub() as server:
        wanted = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        with environment(wanted):
            yield
