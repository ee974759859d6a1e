"""A server's life: bind, load, serve, drain at the first SIGTERM or Ctrl-C, stop at the second."""

from __future__ import annotations

import logging
import socket
from typing import Any

import uvicorn

from paceline.config import ServerConfig
from paceline.errors import ConfigError

logger = logging.getLogger("paceline.serving")


class Server:
    """Serves an application on one address.

    Attributes:
        socket: bound to it.
        url: where it is.
    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, config: ServerConfig) -> None:
        host, kind = config.host, socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self.socket = socket.socket(kind, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, config.port))
        except (OSError, OverflowError) as error:
            self.socket.close()
            why = f"cannot listen on {host} port {config.port} ({error}); choose another --host or --port"
            raise ConfigError(why) from None
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.socket.getsockname()[1]}"

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
