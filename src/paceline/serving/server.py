"""A server's life: bind, say that it is not ready while the model is loaded, serve, let what runs end at the first
signal, and cut it off at the second.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any, Final, Literal

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.config import ServerConfig
from paceline.errors import ConfigError
from paceline.serving.entrance import Entrance, NotReady, guarded, metered

NAMES: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
SIGNALS: Final = tuple(signal.Signals[name] for name in NAMES if hasattr(signal, name))
"""A server is stopped by these signals."""

LINGER: Final = 2
"""Connections have so many seconds to close when no request runs any more."""

PIECE: Final = 2**12
"""So many bytes are read at once."""


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
        """Read one piece of what has come, and the next one when others have had a turn."""
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
    """Lets what runs end at the first signal, whichever it is, and cuts it off at the second; its base does so only at
    Ctrl-C, and without a word to the clients.

    Args:
        seconds: that running requests have.
    Attributes:
        code: for the process to exit with.
    """

    def __init__(self, config: uvicorn.Config, app: Entrance, seconds: float) -> None:
        super().__init__(config)
        self._entrance, self._seconds, self.code = app, seconds, 0

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """In this block signals stop the server. One that is ignored when it begins, as SIGHUP is under nohup, stays
        so, and none is raised again behind it.
        """
        if current_thread() is not main_thread():  # which gets none
            yield
            return
        wanted = [
            number for number in SIGNALS if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
        ]
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal that comes, and cut off what runs at the second."""
        if self.should_exit:
            self.force_exit, self.code = True, 128 + sig
        self.should_exit = True

    async def main_loop(self) -> None:
        """Serve until a signal comes and nothing runs any more; meanwhile new requests are still answered, with 503."""
        await super().main_loop()
        await self._entrance.drain(self._seconds, lambda: self.force_exit)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections, and end the application in order also where a second signal has come: its base leaves
        it to be cancelled then.
        """
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


class Server:
    """Serves an application on one address, or on a Unix socket.

    Attributes:
        socket: bound to it.
        url: where it is.
    Raises:
        ConfigError: the address cannot be bound, or the certificate cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        _check_certificate(config)
        self._config, self._seconds = config, config.receive_timeout
        self.socket = _tcp_socket(config) if config.uds is None else _unix_socket(config.uds)
        scheme, host = "http" if config.ssl_certfile is None else "https", config.host
        if config.uds is None:
            self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.socket.getsockname()[1]}"
        else:
            self.url = f"{scheme}+unix:{config.uds}"

    @contextmanager
    def not_ready(self) -> Iterator[NotReady]:
        """In this block requests are answered 503, from another thread; what it gives says why."""
        told = NotReady()
        before = guarded(metered(told, self._config, lambda status: None), self._config, lambda status: None)
        server = _Stopping(self._http(before, lifespan="off"), before, LINGER)
        self.socket.listen()  # whoever comes first waits for the thread
        thread = Thread(target=server.run, kwargs={"sockets": [self.socket.dup()]}, daemon=True)
        thread.start()
        try:
            yield told
        finally:
            server.should_exit = True
            thread.join()

    def run(self, app: Entrance) -> int:
        """Serve until a signal comes; running requests then have `drain_timeout` seconds to end.

        Returns:
            the code for the process to exit with: 0, or that of a second signal, which has cut off what ran.
        """
        server = self.prepared(app)
        server.run(sockets=[self.socket])
        if self._config.uds is not None:
            Path(self._config.uds).unlink(missing_ok=True)
        return server.code

    def prepared(self, app: Entrance) -> _Stopping:
        """Return what serves, to be run on `socket`."""
        return _Stopping(self._http(app, lifespan="on"), app, self._config.drain_timeout)

    def _http(self, app: Entrance, *, lifespan: Literal["on", "off"]) -> uvicorn.Config:
        """Return uvicorn's settings for an application."""
        return uvicorn.Config(
            app,
            http=partial(_Connection, seconds=self._seconds),  # type: ignore[arg-type]  # it makes one
            ws="none",
            log_config=None,
            access_log=False,
            lifespan=lifespan,
            server_header=False,
            timeout_graceful_shutdown=LINGER,
            h11_max_incomplete_event_size=64 * 1024,
            ssl_certfile=self._config.ssl_certfile,
            ssl_keyfile=self._config.ssl_keyfile,
            ssl_ca_certs=self._config.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if self._config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        )


def _tcp_socket(config: ServerConfig) -> socket.socket:
    """Return a socket that is bound to the address.

    Raises:
        ConfigError: it cannot be bound.
    """
    host, kind = config.host, socket.AF_INET6 if ":" in config.host else socket.AF_INET
    bound = socket.socket(kind, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # for which asyncio sends at once
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # cuts off clients that take nothing of their answers
        most = min(int(1000 * config.receive_timeout), 2**31 - 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most)
    try:
        bound.bind((host, config.port))
    except (OSError, OverflowError) as error:
        bound.close()
        why = f"cannot listen on {host} port {config.port} ({error}); choose another --host or --port"
        raise ConfigError(why) from None
    return bound


def _unix_socket(file: str) -> socket.socket:
    """Return a Unix socket that is bound to a file. One that a server has left behind there makes way, if nobody
    listens on it.

    Raises:
        ConfigError: it cannot be bound, or another server listens there.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError("uds is not available on this system; give host and port")
    if Path(file).is_socket() and not _is_listened_on(file):
        Path(file).unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(file)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on the Unix socket {file} ({error}); choose another --uds") from None
    return bound


def _is_listened_on(file: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(file) == 0


def _check_certificate(config: ServerConfig) -> None:
    """Try out the files of TLS.

    Raises:
        ConfigError: one that cannot be used.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # which errors of ssl are, too
        files = " and ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile)))
        raise ConfigError(f"ssl_certfile must be a certificate with its key, got {files} ({error})") from None
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:
        raise ConfigError(f"ssl_ca_certs must be certificates, got {config.ssl_ca_certs} ({error})") from None
