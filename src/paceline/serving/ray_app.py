"""Replicas on Ray Serve: each a process with an engine and the application of `create_app`, which Ray starts, watches
and replaces. Requests come from `Front` over Ray's handles; Ray's own HTTP server stays off.

Import it inside `paceline.utils.local_ray`, which sets what Ray reads when it is imported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from ipaddress import ip_address
from typing import Any, Final

import psutil
from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, WorkerCrashedError
from ray.serve._private import replica as internals
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException, ReplicaUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.types import Message

from paceline.async_llm import AsyncLLM
from paceline.config import ReplicaConfig, ServerConfig
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM
from paceline.serving.app import create_app
from paceline.serving.request_log import JsonLines
from paceline.serving.routing import Affinity, SeenPrefixes, ranked
from paceline.serving.warming import warm_up
from paceline.utils import alive

APPLICATION: Final = "paceline"
MOST_ONGOING: Final = 100_000
"""Requests of a replica as far as Ray is concerned; the limits are `ServerConfig`'s."""

LEAVES: Final = 5.0
"""Seconds in which the application must have noticed that a client has gone."""

SCALING: Final = {"upscale_delay_s": 3.0, "downscale_delay_s": 120.0}
"""A replica comes when requests have queued for so long, and goes when they have been fewer for so long."""

QUIET: Final = {"log_level": "WARNING", "enable_access_log": False}

TOLD: Final = 10.0
"""Seconds in which replicas must answer what all are asked."""

Json = dict[str, Any]
Messages = list[Message]


class Replica:
    """One engine behind the server's routes, in a process of Ray's, which is ready when it has decoded once.

    Args:
        options: of `LLM`.
        config: of the server; limits that it counts hold for this replica.
        alone: all replicas are on this machine, and no other one may reach them.
    """

    def __init__(self, options: Mapping[str, Any], config: ServerConfig, *, alone: bool) -> None:
        self._alone = alone
        if alone:
            _listen_on_loopback()
        self.name: str = serve.get_replica_context().replica_id.unique_id
        self._error = ""
        self._life: AbstractAsyncContextManager[None] | None = None
        logging.basicConfig(level=logging.WARNING)
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
        logging.getLogger("paceline").setLevel(logging.INFO if config.log_requests else logging.WARNING)
        try:
            self._model = AsyncLLM(LLM(**options))
            self._app = create_app(self._model, config)
            warm_up(self._model.llm)
        except PacelineError as error:
            self._error = str(error)  # told by `fault`: another try would end in the same way

    async def fault(self) -> str:
        """Return why this replica cannot be used; empty where it can."""
        if self._alone and (ports := _open_ports()):
            return f"this version of Ray listens beyond 127.0.0.1 ({', '.join(ports)}); use --ray-address, or another"
        return self._error

    async def check_health(self) -> None:
        """Raise where the engine has ended; Ray Serve replaces a replica that does."""
        if not self._error and self._model.llm.closed:
            raise RuntimeError("the engine has ended")

    async def answer(self, scope: Json, body: bytes, affinity: Affinity = ()) -> AsyncGenerator[Messages]:
        """Yield what the application sends, as it comes.

        Args:
            affinity: for the router.
        """
        await self._begun()
        sent = asyncio.Queue[Message | None]()
        gone, asked = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while part := await _come(sent):
                yield part
            await task
        finally:
            gone.set()
            if not task.done():
                await asyncio.wait({task}, timeout=LEAVES)
                task.cancel()

    async def whole(self, scope: Json, body: bytes) -> tuple[str, int, Messages]:
        """Return this replica's name, the status and all messages of an answer that is no stream."""
        messages = [message async for part in self.answer(scope, body) for message in part]
        return self.name, messages[0]["status"], messages

    async def _begun(self) -> None:
        if self._life is None:
            self._life = alive(self._app)
            await self._life.__aenter__()


def _listen_on_loopback() -> None:
    """Keep Ray Serve from opening a port on all interfaces in each replica, for which it has no option. It asks for a
    token there, but what need not be reached should not be. A version of Ray that does it otherwise is found by
    `_open_ports`.
    """
    if not hasattr(internals, "add_port_to_grpc_server"):
        return
    listen = internals.add_port_to_grpc_server
    internals.add_port_to_grpc_server = lambda server, address: listen(server, address.replace("[::]", "127.0.0.1"))


def _open_ports() -> list[str]:
    """Return where this process listens beyond this machine."""
    addresses = [
        connection.laddr
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    return [f"{ip} port {port}" for ip, port in addresses if not ip_address(ip.removeprefix("::ffff:")).is_loopback]


async def _come(sent: asyncio.Queue[Message | None]) -> Messages:
    """Return all messages that are there, at least one; none at the end."""
    messages = [await sent.get()]
    while not sent.empty():
        messages.append(sent.get_nowait())
    if messages[-1] is None:
        sent.put_nowait(None)
    return [message for message in messages if message is not None]


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # of Ray, which has no types
    """Chooses replicas for Ray Serve, by `ranked`."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._seen = SeenPrefixes()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._seen.keep(replica.replica_id.unique_id for replica in replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of one replica each, the best first."""
        affinity = _affinity(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        queues = self.replica_queue_len_cache
        loads = {name: queues.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        return [[by_name[name]] for name in ranked(affinity, self._seen.shared(affinity), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        self._seen.add(_affinity(pending_request), replica_id.unique_id)


def _affinity(request: PendingRequest | None) -> Affinity:
    affinity: Affinity = () if request is None else request.kwargs.get("affinity", ())
    return affinity


class Replicas:
    """Asks the replicas of a deployment, as `Fleet` has it.

    Args:
        handle: of the deployment.
    """

    gone: tuple[type[Exception], ...] = (
        RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError, ReplicaUnavailableError
    )  # fmt: skip
    failed: tuple[type[Exception], ...] = (RayError, RayServeException)

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @asynccontextmanager
    async def answer(self, scope: Json, body: bytes, affinity: Affinity) -> AsyncGenerator[Any]:
        """Give the parts of an answer as they come, from the replica that suits the request best."""
        parts = self._handle.options(stream=True).answer.remote(scope, body, affinity=affinity)
        try:
            yield parts
        finally:
            parts.cancel()

    async def all(self, scope: Json, body: bytes = b"") -> list[tuple[str, int, Messages]]:
        """Ask every replica; those that die meanwhile are left out."""
        pending = self._handle.broadcast("whole", scope, body)
        answers = await pending.results_async(timeout_s=TOLD, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def check(self) -> None:
        """Raise what kept the replicas from loading their model.

        Raises:
            ConfigError: in the words of `LLM`.
        """
        for why in filter(None, self._handle.broadcast("fault").results()):
            raise ConfigError(why)


@contextmanager
def replicated(options: Mapping[str, Any], config: ServerConfig, wanted: ReplicaConfig) -> Iterator[Replicas]:
    """Start replicas, and give them when they have loaded their model, until the block ends.

    Args:
        options: of `LLM`, without `threads` where they are to share the cores.
        config: of the server; it must name a `response_file`, or stored responses are each replica's own.
    Raises:
        ConfigError: the model cannot be loaded.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config=QUIET)
    handle = serve.run(_deployment(options, config, wanted), name=APPLICATION, route_prefix=None)
    try:
        replicas = Replicas(handle)
        replicas.check()
        yield replicas
    finally:
        if wanted.ray_address is not None:  # otherwise they end with Ray
            serve.delete(APPLICATION)


def _deployment(options: Mapping[str, Any], config: ServerConfig, wanted: ReplicaConfig) -> Any:
    """Describe the replicas to Ray Serve: their number, their cores, their health and how they are chosen."""
    threads = wanted.threads(options.get("threads"))
    resources: dict[str, float] = {"num_cpus": threads}
    if str(options.get("device", "")).startswith("cuda"):
        resources["num_gpus"] = 1
    more: dict[str, Any] = {"num_replicas": wanted.replicas}
    if wanted.most > wanted.replicas:
        together = options.get("max_num_seqs", 16)
        scaling = {"min_replicas": wanted.replicas, "max_replicas": wanted.most, "target_ongoing_requests": together}
        more = {"autoscaling_config": scaling | SCALING}
    if wanted.prefix_routing:
        more["request_router_config"] = RequestRouterConfig(request_router_class=f"{__name__}:{PrefixRouter.__name__}")
    deployment = serve.deployment(Replica).options(
        name="replica",
        ray_actor_options=resources,
        max_ongoing_requests=MOST_ONGOING,
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=60.0,
        logging_config=QUIET,
        **more,
    )
    return deployment.bind({**options, "threads": threads}, config, alone=wanted.ray_address is None)
