"""Where a server is reached: HTTPS, a Unix socket, a path of a proxy, and what load balancers ask."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving.conftest import Live, comes, serve, slowed
from serving.test_operations import Near

from paceline import LLM, AsyncLLM
from paceline.config import ServerConfig
from paceline.errors import ConfigError
from paceline.serving import Server, create_app, front_app

COMPLETIONS = "/v1/completions"
BODY = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
serving = contextmanager(serve)


@contextmanager
def running(llm: LLM, *, replicated: bool = False, **options: Any) -> Iterator[Server]:
    """A server that runs as the command runs it, but for its signals; `replicated` puts the one before replicas there,
    with one of them in this process.
    """
    config = ServerConfig(port=0, drain_timeout=2.0, **options)
    server, app = Server(config), create_app(AsyncLLM(llm), config)
    app = front_app(Near(app), config) if replicated else app
    prepared = server.prepared(app)
    server.prepared = lambda _: prepared  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, args=(app,), daemon=True)
    thread.start()
    assert comes(lambda: prepared.started)
    yield server
    prepared.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def openssl(*arguments: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate of its own, for this machine, and its key."""
    files = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", files[0], "-keyout", files[1])  # fmt: skip
    return files


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: certificate(folder, name) for name in ("server", "client", "stranger")}


def trusting(certfile: str, shown: tuple[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certfile)
    if shown is not None:
        context.load_cert_chain(*shown)
    return context


def test_https_with_the_right_certificate_and_not_with_another(
    llm: LLM, certificates: dict[str, tuple[str, str]]
) -> None:
    certfile, keyfile = certificates["server"]
    with running(llm, ssl_certfile=certfile, ssl_keyfile=keyfile) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=server.url, verify=trusting(certfile), timeout=60) as http:
            assert http.post(COMPLETIONS, json=BODY).status_code == 200
            lines = http.post(COMPLETIONS, json=BODY | {"stream": True}).text.splitlines()
            assert lines[-2] == "data: [DONE]"
            long = "word " * 20_000  # is read in pieces
            assert http.post("/tokenize", json={"prompt": long}).json()["count"] >= 20_000
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/health", verify=trusting(certificates["stranger"][0]))
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(server.url.replace("https:", "http:"))


def test_clients_show_a_certificate_that_is_known(llm: LLM, certificates: dict[str, tuple[str, str]]) -> None:
    certfile, keyfile = certificates["server"]
    options = {"ssl_certfile": certfile, "ssl_keyfile": keyfile}
    with running(llm, **options, ssl_ca_certs=certificates["client"][0]) as server:
        known = trusting(certfile, certificates["client"])
        assert httpx.get(f"{server.url}/health", verify=known).status_code == 200
        for shown in (None, certificates["stranger"]):
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                httpx.get(f"{server.url}/health", verify=trusting(certfile, shown))
    with running(llm, **options) as server:
        assert httpx.get(f"{server.url}/health", verify=trusting(certfile)).status_code == 200, "the control"


def test_while_the_model_is_loaded_https_says_so(certificates: dict[str, tuple[str, str]]) -> None:
    certfile, keyfile = certificates["server"]
    server = Server(ServerConfig(port=0, ssl_certfile=certfile, ssl_keyfile=keyfile))
    with server.not_ready():
        answer = httpx.get(f"{server.url}/ping", verify=trusting(certfile), timeout=30)
    assert (answer.status_code, answer.json()["status"]) == (503, "loading the model")
    server.socket.close()


def test_files_of_tls_are_looked_at_before_anything_else(certificates: dict[str, tuple[str, str]]) -> None:
    certfile, keyfile = certificates["server"]
    for options, line in (
        ({"ssl_keyfile": keyfile}, "ssl_keyfile must be given with ssl_certfile"),
        ({"ssl_ca_certs": certfile}, "ssl_ca_certs must be given with ssl_certfile"),
        ({"ssl_certfile": certfile}, "ssl_certfile must be a certificate with its key"),
        ({"ssl_certfile": certfile, "ssl_keyfile": certificates["client"][1]}, "ssl_certfile must be a certificate"),
        ({"ssl_certfile": certfile, "ssl_keyfile": keyfile, "ssl_ca_certs": keyfile}, "ssl_ca_certs must be cert"),
        ({"ssl_certfile": "/nowhere", "ssl_keyfile": keyfile}, "ssl_certfile must be a certificate"),
    ):
        with pytest.raises(ConfigError, match=line):
            Server(ServerConfig(port=0, **options))


def over(file: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(file)), base_url="http://localhost", timeout=60)


def test_a_unix_socket(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "socket"
    with running(llm, uds=str(file)) as server, over(file) as http:
        assert server.url == f"http+unix:{file}"
        assert http.post(COMPLETIONS, json=BODY).status_code == 200
        assert http.get("/health", headers={"host": "evil.example"}).status_code == 421
        with pytest.raises(ConfigError, match="cannot listen on the Unix socket"):
            Server(ServerConfig(uds=str(file)))
    assert not file.exists(), "its end takes it away"


def test_a_unix_socket_that_was_left_behind_makes_way_and_a_file_does_not(tmp_path: Path) -> None:
    left = tmp_path / "left"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(left))
    server = Server(ServerConfig(uds=str(left)))
    with server.not_ready(), over(left) as http:
        assert http.get("/health").status_code == 503
    server.socket.close()
    kept = tmp_path / "kept"
    kept.write_text("mine")
    with pytest.raises(ConfigError, match="choose another --uds"):
        Server(ServerConfig(uds=str(kept)))
    assert kept.read_text() == "mine"


def test_the_path_of_a_proxy_is_taken_off_once(llm: LLM) -> None:
    with running(llm, root_path="/llm") as server:
        codes = [httpx.get(f"{server.url}{path}").status_code for path in ("/health", "/llm/health", "/llm/llm/health")]
    assert codes == [200, 200, 404]


def test_before_replicas_all_of_it_holds_too(
    llm: LLM, tmp_path: Path, certificates: dict[str, tuple[str, str]]
) -> None:
    certfile, keyfile = certificates["server"]
    options: dict[str, Any] = {"replicated": True, "root_path": "/llm", "ssl_certfile": certfile}
    with running(llm, **options, ssl_keyfile=keyfile) as server:
        with httpx.Client(base_url=server.url, verify=trusting(certfile), timeout=60) as http:
            for path in (COMPLETIONS, "/llm/v1/completions"):
                assert http.post(path, json=BODY).json()["usage"]["completion_tokens"] == 3
            assert comes(lambda: http.get("/load").json() == {"server_load": 0})
            assert (http.get("/ping").status_code, http.post("/ping").status_code) == (503, 503), "it asks nobody here"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/health", verify=trusting(certificates["stranger"][0]))
    with running(llm, replicated=True, uds=str(tmp_path / "socket")), over(tmp_path / "socket") as http:
        assert http.post(COMPLETIONS, json=BODY).status_code == 200


def test_under_a_path_of_a_proxy_that_takes_it_off_and_of_one_that_does_not(llm: LLM, live: Live) -> None:
    with serving(AsyncLLM(llm), root_path="/llm", api_key=["key"]) as below:
        for path in ("/llm/v1/completions", COMPLETIONS):
            assert below.post(path, **BODY).status_code == 401, "a key is asked for under both"
            assert below.http.post(path, json=BODY, headers={"x-api-key": "key"}).status_code == 200
        for path in ("/llm/health", "/health", "/llm/", "/llm/static/page.css"):
            assert below.http.get(path).status_code == 200, path
        document = below.http.get("/llm/openapi.json", headers={"x-api-key": "key"}).json()
        assert document["servers"] == [{"url": "/llm"}]
        assert below.http.get("/llmx/health", headers={"x-api-key": "key"}).status_code == 404
    assert live.http.get("/llm/health").status_code == 404, "the control, without"
    for wrong in ("llm", "/llm/", "/", "/a b"):
        with pytest.raises(ConfigError, match="root_path must be a path"):
            ServerConfig(root_path=wrong)


def test_ping_answers_as_health_does_and_load_counts_what_runs(llm: LLM) -> None:
    with serving(AsyncLLM(llm), api_key=["key"]) as live:
        assert live.http.get("/ping").json() == live.http.get("/health").json()
        assert live.http.post("/ping").status_code == 200, "without a key, a body and its type"
        assert live.http.get("/load").status_code == 401
        live.http.headers["x-api-key"] = "key"
        assert live.http.get("/load").json() == {"server_load": 0}
        body = BODY | {"max_tokens": 1900, "stream": True}
        with slowed(llm), live.http.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()  # whose end would end the request
            assert next(lines).startswith("data: {")
            assert httpx.get(f"{live.url}/load", headers={"x-api-key": "key"}).json() == {"server_load": 1}
        assert comes(lambda: live.http.get("/load").json() == {"server_load": 0})
