"""What `deploy/` has fits the server: flags, ports, routes, keys, and limits that must be wider than its own."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from code_blocks import WrongCommandError, check_parameters, parsed

from paceline import LLM, AsyncLLM
from paceline.config import ServerConfig
from tests.serving.conftest import Live, serve

DEPLOY = Path(__file__).parents[2] / "deploy"
DEFAULTS = ServerConfig()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
NGINX = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
UNIT = (DEPLOY / "paceline.service").read_text(encoding="utf-8")


def instruction(name: str) -> list[str]:
    """The list of the last line of the Dockerfile that begins so."""
    found: list[str] = json.loads(re.findall(rf"^ *{name} .*?(\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])
    return found


def started() -> dict[str, list[str]]:
    """What starts the server -> the words after `paceline`."""
    entry = instruction("ENTRYPOINT")[1:]
    (unit,) = re.findall(r"^ExecStart=\S+/paceline (.*)$", UNIT, re.MULTILINE)
    return {
        "image": [*entry, *instruction("CMD")],
        "compose": [*entry, *COMPOSE["services"]["server"]["command"]],
        "systemd": shlex.split(unit),
    }


def seconds(value: str) -> float:
    return float(re.fullmatch(r"(\d+)s?", value)[1])  # type: ignore[index]


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with the flags of compose.yaml that decide who gets in."""
    key = tmp_path_factory.mktemp("secrets") / "api-key"
    key.write_text("secret\n")
    flags = parsed(started()["compose"])
    yield from serve(AsyncLLM(LLM()), api_key_file=str(key), allowed_host=flags["allowed_host"])


@pytest.mark.parametrize("way", ["image", "compose", "systemd"])
def test_the_server_is_started_with_flags_that_it_has(way: str) -> None:
    words = started()[way]
    found = parsed(words)
    check_parameters(found)
    assert words[0] == "serve"
    assert found["host"] == (None if way == "systemd" else "0.0.0.0")
    with pytest.raises(WrongCommandError, match="No such option"):
        parsed([*words, "--no-such-flag"])


def test_the_container_is_healthy_once_the_server_is_ready(behind: Live) -> None:
    _, option, code = instruction("CMD")[0], *instruction("HEALTHCHECK[^\n]*CMD")[1:]

    def ends(address: str) -> int:
        words = [sys.executable, option, code.replace("http://127.0.0.1:8000", address)]
        return subprocess.run(words, capture_output=True, check=False).returncode

    assert "http://127.0.0.1:8000/" in code
    assert ends(behind.url) == 0
    assert ends("http://127.0.0.1:1") != 0
    assert ends(f"{behind.url}/nowhere") != 0


def test_prometheus_may_read_the_metrics(behind: Live) -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    service, port = target.split(":")
    assert (service in COMPOSE["services"], int(port)) == (True, DEFAULTS.port)
    secrets = COMPOSE["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secrets[0]}"

    def status(host: str, key: str) -> int:
        headers = {"host": host, "authorization": f"Bearer {key}"}
        return httpx.get(behind.url + job["metrics_path"], headers=headers).status_code

    assert status(target, "secret") == 200
    assert status("other:8000", "secret") == 421
    assert status(target, "other") == 401


def test_grafana_shows_the_dashboard_of_the_docs() -> None:
    """Another test holds its queries against the metrics that there are."""
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    files = {(DEPLOY / source).resolve(): Path(place) for source, place in mounted.items() if source.startswith(".")}
    assert all(path.is_file() for path in files)
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text(encoding="utf-8"))["providers"]
    assert files[DEPLOY.parent / "docs" / "grafana.json"].parent == Path(provider["options"]["path"])
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasources.yaml").read_text(encoding="utf-8"))["datasources"]
    assert source["type"] == "prometheus"
    assert httpx.URL(source["url"]).host in COMPOSE["services"]


def test_ports_are_published_on_this_machine_alone() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert f"EXPOSE {DEFAULTS.port}" in DOCKERFILE


def test_the_image_runs_as_nobody_who_may_do_anything() -> None:
    users = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert users
    assert users[-1] != "0"
    assert DOCKERFILE.index("USER ") < DOCKERFILE.index("ENTRYPOINT")


def directive(name: str) -> str:
    (found,) = re.findall(rf"^\s*{name} ([^;]+);", NGINX, re.MULTILINE)
    return str(found)


def test_a_proxy_waits_longer_and_lets_through_as_much_as_the_server() -> None:
    assert directive("client_max_body_size") == f"{DEFAULTS.max_body_bytes // 2**20}m"
    assert seconds(directive("proxy_read_timeout")) > DEFAULTS.request_timeout
    assert directive("proxy_buffering") == "off"
    assert re.search(rf"server 127\.0\.0\.1:{DEFAULTS.port};", NGINX)
    names = set(re.findall(r"server_name ([^;]+);", NGINX))
    assert names == set(parsed(started()["systemd"])["allowed_host"])


def test_a_server_that_stops_has_time_to_drain() -> None:
    (unit,) = re.findall(r"^TimeoutStopSec=(.*)$", UNIT, re.MULTILINE)
    for wait in (unit, COMPOSE["services"]["server"]["stop_grace_period"]):
        assert seconds(wait) > DEFAULTS.drain_timeout


def test_files_name_the_same_folders() -> None:
    server: dict[str, Any] = COMPOSE["services"]["server"]
    places = [volume.rsplit(":", 2)[-2 if volume.endswith(":ro") else -1] for volume in server["volumes"]]
    model, cache = places
    assert model == instruction("CMD")[0]
    for text in (DOCKERFILE, UNIT):
        assert f"PACELINE_CACHE_DIR={cache} NUMBA_CACHE_DIR={cache}/kernels" in text
    assert f"VOLUME {cache}" in DOCKERFILE
    assert f"CacheDirectory={Path(cache).name}" in UNIT
