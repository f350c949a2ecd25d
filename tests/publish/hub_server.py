"""A Hub on loopback, and every way in which it can fail. What it says is in `tests.publish.hub_routes`."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.publish.hub_routes import Answer, Request, route
from tests.publish.hub_store import Refused, Store

TOKEN = "hf_PlantedTokenThatMustNeverBeSeen0123"
USER = "tester"


@dataclass
class Fault:
    """What goes wrong with the requests that match.

    Args:
        match: regular expression for "METHOD path".
        status: answer with it, instead of doing the work.
        headers: of that answer.
        body: of that answer; a message where it is empty.
        drop: close the connection, "before" the work, in the "middle" of the request's body, or "after" the work.
        hold: never answer; in the middle of the body, or at once where there is none. The connection is closed by
            `LoopbackHub.release`.
        first: called before anything else is done.
        times: how many requests it hits; None for all.
        skip: how many it lets pass before.
    """

    match: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    drop: str = ""
    hold: bool = False
    first: Callable[[], None] | None = None
    times: int | None = 1
    skip: int = 0
    hits: int = 0


class LoopbackHub(ThreadingHTTPServer):
    """The server; ``url`` is its address for HF_ENDPOINT."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = Store()
        self.store.writers[TOKEN] = USER
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.cdn = f"http://localhost:{self.server_port}"  # another host: no token may arrive there
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.damage: list[re.Pattern[str]] = []
        self.release = threading.Event()
        self.held = threading.Event()

    def fault(self, match: str, **settings: Any) -> Fault:
        """Let requests fail from now on; see `Fault`."""
        self.faults.append(Fault(match=match, **settings))
        return self.faults[-1]

    def corrupt(self, path: str) -> None:
        """Store other bytes than are sent for files that match, from now on (objects by their SHA-256)."""
        self.damage.append(re.compile(path))

    def stored(self, key: str, content: bytes) -> bytes:
        """What is kept of this content."""
        if any(pattern.search(key) for pattern in self.damage):
            return bytes([content[0] ^ 1]) + content[1:]
        return content

    def lines(self, pattern: str = "") -> list[str]:
        """The requests so far, as "METHOD path", that match."""
        return [one.line for one in self.requests if re.search(pattern, one.line)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that clients close are part of the tests."""


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    """A server that runs within the block."""
    with LoopbackHub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
            thread.join()


class _Dropped(Exception):
    """The connection is to be closed without an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: LoopbackHub

    def _serve(self) -> None:
        request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        self.server.requests.append(request)
        fault = self._fault(request)
        try:
            if fault is not None and fault.first is not None:
                fault.first()
            if fault is not None and fault.drop == "before":
                raise _Dropped
            body = self._body(request, fault)
            if fault is not None and fault.hold:
                self._hold()
            if fault is not None and fault.status:
                message = fault.body or json.dumps({"error": f"injected {fault.status}"}).encode()
                kind = "application/json" if not fault.body else "text/html"
                answer: Answer = (fault.status, {"Content-Type": kind, **fault.headers}, message)
            else:
                answer = self._answer(request, body)
            if fault is not None and fault.drop == "after":
                raise _Dropped
            self._send(answer)
        except _Dropped:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _fault(self, request: Request) -> Fault | None:
        with self.server.store.lock:
            for fault in self.server.faults:
                if re.search(fault.match, request.line) and (
                    fault.times is None or fault.hits < fault.skip + fault.times
                ):
                    fault.hits += 1
                    return fault if fault.hits > fault.skip else None
        return None

    def _hold(self) -> None:
        self.server.held.set()
        self.server.release.wait()
        raise _Dropped

    def _body(self, request: Request, fault: Fault | None) -> bytes:
        if request.headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(parts)
        else:
            size = int(request.headers.get("content-length") or 0)
            half = size // 2 if fault is not None and (fault.drop == "middle" or (fault.hold and size)) else size
            body = self.rfile.read(half)
            if len(body) < half:
                raise _Dropped  # the client has gone
            if fault is not None and fault.drop == "middle":
                raise _Dropped
            if half < size:
                self._hold()
        request.bytes = len(body)
        return body

    def _answer(self, request: Request, body: bytes) -> Answer:
        try:
            return route(self.server, request, body)
        except Refused as refused:
            headers = {"Content-Type": "application/json", "X-Error-Message": refused.message}
            headers |= {"X-Error-Code": refused.code} if refused.code else {}
            return refused.status, headers, json.dumps({"error": refused.message}).encode()

    def _send(self, answer: Answer) -> None:
        status, headers, body = answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""
