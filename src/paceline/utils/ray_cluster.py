"""Ray on this machine alone, or a cluster that somebody else runs.

Ray's processes talk to each other over sockets, and whoever reaches them can run code. So those that are started here
listen on 127.0.0.1, ask each other for a token drawn for this run, and keep their files where only this user reads.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final

from paceline.errors import ConfigError

QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "GRPC_VERBOSITY": "ERROR",
    "RAY_worker_niceness": "0",  # engines are no background work
    "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "3600",  # what is known of a queue holds until there is news
}
LOCAL: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
"""The first makes Ray's processes listen on 127.0.0.1, on Linux as on other systems."""

OBJECT_BYTES: Final = 256 * 2**20
"""Memory for what processes hand to each other; most of it goes by other ways."""


CONNECT: Final = 5.0
"""Seconds in which a cluster must answer."""


def need_ray(what: str) -> None:
    """Check that Ray is installed.

    Args:
        what: needs it.
    Raises:
        ConfigError: it is not.
    """
    if find_spec("ray") is None:
        raise ConfigError(f"{what} needs Ray; pip install '.[ray]' in a checkout")


@contextmanager
def local_ray(cpus: int, address: str | None = None, *, show_logs: bool = False) -> Iterator[Any]:
    """The module `ray`, connected until the block ends. Ray must not have been imported before.

    Args:
        cpus: that Ray hands out on this machine; where it is more than there are, they share.
        address: of a cluster that runs already, as `host:6379`, or `auto`; None starts one on 127.0.0.1, which ends
            with the block.
        show_logs: what Ray's processes write to their standard output and error appears on ours.
    Raises:
        ConfigError: no cluster answers there.
    """
    settings = {} if address is not None else LOCAL | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if address is not None:
        _reach(address)
    os.environ.update(QUIET | settings)
    import ray

    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": show_logs}
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        if address is None:
            options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_BYTES}
            options["_temp_dir"] = os.path.join(folder, "ray")  # which Ray opens to everybody; its parent is ours
        try:
            ray.init(address or "local", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _away(address, str(error).splitlines()[0]) from None
        try:
            yield ray
        finally:
            ray.shutdown()


def _reach(address: str) -> None:
    """Raise where nobody listens, which Ray would take minutes to notice."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT).close()
    except (OSError, OverflowError) as error:
        raise _away(address, str(error)) from None


def _away(address: str | None, why: str) -> ConfigError:
    where = "could not be started" if address is None else f"cannot be reached at {address!r}"
    return ConfigError(f"Ray {where} ({why})" + ("" if address is None else "; start it, or give another address"))
