"""What a server listens to, whom it lets in, and the most that a request may ask for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.config.declared import check_options, documented, option
from paceline.config.embedding import POOLINGS
from paceline.utils import MAX_COUNT, need, strings

TOOL_FORMATS: Final = (
    *("hermes", "mistral", "mistral_args", "llama3_json", "pythonic", "qwen3_coder", "openai", "glm45"),
    *("deepseek_v3", "deepseek_v31", "kimi_k2", "seed_oss", "minimax_m2", "hunyuan_a13b", "olmo3"),
    *("apertus", "gemma4", "phi4_mini_json"),
)
"""How models write calls of functions (serving.chat.formats)."""

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1", "[::1]")

ORIGIN: Final = r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+"
"""What pages are from, as browsers write it."""


def _check_names(name: str, value: object) -> None:
    need(all(text.strip() for text in strings(name, value)), name, "not be empty; leave it out", "an empty text")


def _check_origins(name: str, value: object) -> None:
    _check_names(name, value)
    for text in strings(name, value):
        need(re.fullmatch(ORIGIN, text) is not None, name, "hold origins, such as https://example.org, or *", text)


def _check_host(name: str, value: object) -> None:
    need(isinstance(value, str) and value != "", name, "be an address", value)


def _check_text(name: str, value: object) -> None:
    need(isinstance(value, str), name, "be a text", value)


def _check_path(name: str, value: object) -> None:
    need(value != "", name, "be a path; leave it out", value)


def _check_root_path(name: str, value: object) -> None:
    fine = isinstance(value, str) and re.fullmatch(r"(/[^/?#\s]+)*", value) is not None
    need(fine, name, "be a path that begins with / and does not end with it", value)


def _seconds(default: float, help: str) -> float:
    return option(default, help, low=0.0, rule="be above 0", open_low=True)


@documented
@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """What one key of a server may ask for, as a key file has it; None is no limit beside the server's own.

    Raises:
        ConfigError: a value outside its range.
    """

    name: str = option("", doc="Whose key it is, for the log and for errors.", check=_check_text)
    requests_per_minute: int | None = option(None, doc="Requests that may be sent in a minute.", low=1)
    tokens_per_minute: int | None = option(None, doc="Tokens of prompts and answers together in a minute.", low=1)
    max_tokens: int | None = option(None, doc="Maximum number of new tokens that a request may ask for.", low=1)
    max_outputs: int | None = option(
        None, doc="Maximum number of outputs, prompts times n, that run or wait at once.", low=1
    )
    max_running: int | None = option(
        None, doc="Maximum number of outputs that are decoded at the same time; the others wait.", low=1
    )
    max_file_bytes: int | None = option(
        None, doc="Maximum number of bytes of all its files of batches together; uploads beyond are rejected.", low=1
    )
    priority: int | None = option(
        None, doc="Priority of requests that give none, and the lowest number that they may give.", low=-MAX_COUNT
    )

    def __post_init__(self) -> None:
        check_options(self)


@documented
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Of `paceline serve`, with vLLM's names where it has them.

    Raises:
        ConfigError: a value outside its range.
    """

    host: str = option("127.0.0.1", "Address to listen on.", check=_check_host)
    port: int = option(8000, "Port; 0 takes a free one. Default: 8000.", low=0, high=65535)
    uds: str | None = option(
        None, "Unix socket to listen on, in place of an address.", metavar="FILE", check=_check_path
    )
    ssl_certfile: str | None = option(None, "Certificate (chain) in PEM; serves HTTPS.", check=_check_path)
    ssl_keyfile: str | None = option(None, "Its private key, where that is not in the same file.", check=_check_path)
    ssl_ca_certs: str | None = option(
        None, "Certificates in PEM; clients must show one that these have signed.", check=_check_path
    )
    root_path: str = option(
        "", "Path under which a proxy shows the server, such as /llm.", metavar="PATH", check=_check_root_path
    )
    served_model_name: Sequence[str] = option(
        (), "Name of the model in requests and answers; may be repeated.", check=_check_names
    )
    api_key: Sequence[str] = option(
        (), "Key that clients must give; may be repeated. Or PACELINE_API_KEY.", check=_check_names
    )
    api_key_file: str | None = option(
        None, "File with one key a line, or, as .yaml, .json or .toml, with the limits of each.", check=_check_path
    )
    admin_key: Sequence[str] = option(
        (), "Key that shows everybody's requests on the live page; may be repeated. Or PACELINE_ADMIN_KEY.",
        check=_check_names,
    )  # fmt: skip
    admin_key_file: str | None = option(None, "File with one such key a line.")
    log_requests: bool = option(False, "Log prompts, and show texts to these keys.")
    allowed_host: Sequence[str] = option(
        (), "Name that the Host header may have, beside this machine's; may be repeated.", check=_check_names,
        doc='Names that the Host header may have, beside this machine\'s; "*.NAME" is all that end so, "*" is any.',
    )  # fmt: skip
    allowed_origins: Sequence[str] = option(
        (), "Origin of pages that may use the server, as https://example.org, * or a JSON list; repeatable.",
        check=_check_origins,
    )  # fmt: skip
    chat_template: str | None = option(None, "File of a chat template that replaces the model's.")
    allow_special_tokens: bool = option(False, "What messages spell like special tokens becomes them.")
    tool_call_parser: str | None = option(
        None, f"How the model writes calls: {', '.join(TOOL_FORMATS)}. Default: as the chat template has it.",
        choices=TOOL_FORMATS,
    )  # fmt: skip
    strict_schemas: bool = option(
        False, "Reject JSON schemas that cannot be enforced, where requests do not say strict."
    )
    lenient_fields: bool = option(
        False, "Ignore fields that cannot be honoured, and name them in the header x-ignored-fields."
    )
    vllm_metrics: bool = option(False, "Give metrics vLLM's own names.")
    embedding_model: str | None = option(
        None, "Folder or hub id of an encoder for /v1/embeddings; default: the served model itself.", check=_check_path
    )
    rerank_model: str | None = option(
        None, "Folder or hub id of a cross-encoder for /v1/rerank and /v1/score; default: cosines of what "
        "--embedding-model makes of texts, where that is given.",
        check=_check_path,
    )  # fmt: skip
    embedding_pooling: str = option(
        "last", f"Embeddings of the served model are states of a text's tokens: {' or '.join(POOLINGS)}.",
        choices=POOLINGS,
    )  # fmt: skip
    max_embedding_texts: int = option(
        2048, "Maximum number of texts of a request for embeddings, rankings or scores.", low=1
    )
    max_embedding_tokens: int = option(2**18, "Maximum number of their tokens together; default: 262144.", low=1)
    max_waiting: int = option(256, "Maximum number of requests that wait; more are answered 429.", low=1)
    max_streams_per_key: int = option(256, "Maximum number of requests of a key that run at once.", low=1)
    max_outputs_per_key: int = option(
        1024, "Maximum number of outputs of a key, prompts times n, that run or wait at once.", low=1
    )
    max_body_bytes: int = option(8 * 2**20, "Maximum length of a request.", low=1)
    max_n: int = option(16, "Maximum number of outputs of a request.", low=1)
    max_prompts: int = option(256, "Maximum number of prompts of a request.", low=1)
    enable_search: bool = option(False, "Let requests decode by search (field search).")
    enable_search_programs: bool = option(False, "Let searches run programs in the sandbox (tests of pg_td).")
    max_search_tokens: int = option(
        2**16, "Maximum number of tokens that a search may compute for a prompt, all branches together.", low=1
    )
    max_request_tokens: int | None = option(
        None, "Maximum number of new tokens that a request may ask for; default: any.", low=1
    )
    max_audio_bytes: int = option(25 * 2**20, "Maximum length of an audio file. Default: 25 MiB.", low=1)
    max_audio_seconds: float = _seconds(3600.0, "Seconds that an audio may last.")
    receive_timeout: float = _seconds(60.0, "Seconds in which a request's head, and then its body, must have arrived.")
    request_timeout: float = _seconds(600.0, "Seconds that a request may take.")
    drain_timeout: float = _seconds(60.0, "Seconds that running requests have to end when the server stops.")
    response_file: str | None = option(
        None, "File that stored responses are kept in; default: memory.", check=_check_path
    )
    max_response_bytes: int = option(
        256 * 2**20, "Maximum length of all stored responses; the oldest are forgotten. Default: 256 MiB.", low=1
    )
    max_response_age: float = _seconds(
        30 * 86400.0, "Seconds after which a stored response is forgotten; default: 30 days."
    )
    batch_folder: str | None = option(
        None, "Folder for uploaded files and batches; default: there are none.", check=_check_path
    )
    max_batch_file_bytes: int = option(200 * 2**20, "Maximum length of an uploaded file. Default: 200 MiB.", low=1)
    max_batch_requests: int = option(50_000, "Maximum number of requests of a batch.", low=1)

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            fine = self.ssl_certfile is not None or getattr(self, name) is None
            need(fine, name, "be given with ssl_certfile", getattr(self, name))
        for name in ("served_model_name", "api_key", "admin_key", "allowed_host", "allowed_origins"):
            vars(self)[name] = strings(name, getattr(self, name))
