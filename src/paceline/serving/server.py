"""A server's life: bind, load, serve, drain at the first SIGTERM or Ctrl-C, stop at the second."""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from types import FrameType
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.config import ServerConfig
from paceline.errors import ConfigError

logger = logging.getLogger("paceline.serving")

PIECE: Final = 2**12
"""Bytes that are read at once."""


class _Connection(H11Protocol):
    """A connection that is closed where a request's head, or its body, takes longer than `seconds` to arrive.

    A body's time is a little longer here, so that the application can answer first. What has come is read in pieces,
    with others' turns in between, since it may be ten thousands of chunks.
    """

    def __init__(self, *arguments: Any, seconds: float, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._state: Any = None
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._unread:
            self._unread += data
        elif len(data) <= PIECE:
            self._read(data)
        else:
            self._unread += data
            self._read_piece()

    def _read_piece(self) -> None:
        if self.transport.is_closing():
            self._unread.clear()
            return
        piece = bytes(self._unread[:PIECE])
        del self._unread[:PIECE]
        self._read(piece)
        if self._unread:
            self.transport.pause_reading()
            self.loop.call_soon(self._read_piece)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.clear()
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock with each head and each body; what comes of it piece by piece does not stop it."""
        if self.conn.their_state is self._state:
            return
        self._state = self.conn.their_state
        self._stop()
        if self._state in (h11.IDLE, h11.SEND_BODY):
            seconds = self._seconds + (self._state is h11.SEND_BODY)
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Stopping(uvicorn.Server):
    """Stops at once at the second signal, whichever it is; its base does at Ctrl-C only."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)


class Server:
    """Serves an application on one address.

    Attributes:
        socket: bound to it.
        url: where it is.
    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._seconds = config.receive_timeout
        host, kind = config.host, socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self.socket = socket.socket(kind, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # for which asyncio sends at once
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # cuts off clients that take nothing of their answers
            most = min(int(1000 * self._seconds), 2**31 - 1)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most)
        try:
            self.socket.bind((host, config.port))
        except (OSError, OverflowError) as error:
            self.socket.close()
            why = f"cannot listen on {host} port {config.port} ({error}); choose another --host or --port"
            raise ConfigError(why) from None
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.socket.getsockname()[1]}"

    def run(self, app: Any, *, drain_seconds: int = 60) -> None:
        """Serve until a signal comes; running requests then have `drain_seconds` to end."""
        self.prepared(app, drain_seconds=drain_seconds).run(sockets=[self.socket])

    def prepared(self, app: Any, *, drain_seconds: int = 60) -> uvicorn.Server:
        """What serves, to be run on `socket`."""
        made = uvicorn.Config(
            app,
            http=partial(_Connection, seconds=self._seconds),  # type: ignore[arg-type]  # it makes one
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=drain_seconds,
            h11_max_incomplete_event_size=64 * 1024,
        )
        return _Stopping(made)
