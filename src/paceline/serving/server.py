"""A server's life: bind, load, serve, drain at the first SIGTERM or Ctrl-C, stop at the second."""

from __future__ import annotations

import logging
import socket
from typing import Any

import uvicorn

from paceline.errors import ConfigError

logger = logging.getLogger("paceline.serving")


class Server:
    """Serves an application on one address.

    Args:
        host, port: where; port 0 takes a free one.
    Attributes:
        port: that was taken.
        socket: bound to it.
    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(kind, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
        except (OSError, OverflowError) as error:
            self.socket.close()
            raise ConfigError(
                f"cannot listen on {host} port {port} ({error}); choose another --host or --port"
            ) from None
        self.host, self.port = host, int(self.socket.getsockname()[1])

    def run(self, app: Any, *, drain_seconds: int = 60) -> None:
        """Serve until a signal comes; running requests then have `drain_seconds` to end."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=drain_seconds,
            h11_max_incomplete_event_size=64 * 1024,
        )
        uvicorn.Server(config).run(sockets=[self.socket])
