"""What a server listens to, whom it lets in, and the most that a request may ask for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.utils import choice, integer, need, number, strings

TOOL_FORMATS: Final = (
    *("hermes", "mistral", "mistral_args", "llama3_json", "pythonic", "qwen3_coder", "openai", "glm45"),
    *("deepseek_v3", "deepseek_v31", "kimi_k2", "seed_oss"),
)
"""How models write calls of functions (serving.chat.formats)."""

MOST: Final = (
    *("max_waiting", "max_streams_per_key", "max_outputs_per_key", "max_body_bytes", "max_n", "max_prompts"),
    "max_response_bytes",
)
"""Limits that are at least 1."""

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1", "[::1]")

ORIGIN: Final = r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+"
"""What pages are from, as browsers write it."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Of `paceline serve`, with vLLM's names where it has them.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        served_model_name: names of the model, the first of which answers tell; none: what it was loaded from.
        api_key: of clients; without any, everybody is let in.
        api_key_file: holds more of them, one a line.
        admin_key, admin_key_file: likewise of those who see the requests of all keys on the live page, without texts.
        log_requests: prompts are in the log, and all texts on the page of those keys.
        allowed_host: names beside those of this machine that the Host header may have; "*.NAME" is all that end so,
            "*" is any.
        allowed_origins: origins whose pages may use the server from a browser, as "https://example.org"; "*" is any.
        chat_template: file of one that replaces the checkpoint's.
        allow_special_tokens: what messages spell like special tokens becomes them; else it is text.
        tool_call_parser: one of TOOL_FORMATS; None is read off the chat template.
        strict_schemas: JSON schemas are strict unless a request says otherwise.
        lenient_fields: fields that cannot be honoured are ignored, and named in the header `x-ignored-fields`.
        vllm_metrics: metrics have vLLM's own names.
        max_waiting, max_streams_per_key: requests that have not begun, and running ones of a key; 429 beyond.
        max_outputs_per_key: outputs of them, prompts times n; 429 beyond, 400 for a request that has more alone.
        max_body_bytes: of a request; 413 beyond.
        max_n, max_prompts, max_request_tokens: outputs, prompts and new tokens of a request; 400 beyond.
        receive_timeout: seconds in which a request's head, and then its body, must have arrived.
        request_timeout: seconds after which a request ends with an error.
        drain_timeout: seconds that running requests have to end when the server stops.
        response_file: SQLite database of the responses that `/v1/responses` stores; None: they are kept in memory.
        max_response_bytes, max_response_age: of their texts together, and seconds; older ones are forgotten.
    Raises:
        ConfigError: a value outside its range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: Sequence[str] = ()
    api_key: Sequence[str] = ()
    api_key_file: str | None = None
    admin_key: Sequence[str] = ()
    admin_key_file: str | None = None
    log_requests: bool = False
    allowed_host: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    chat_template: str | None = None
    allow_special_tokens: bool = False
    tool_call_parser: str | None = None
    strict_schemas: bool = False
    lenient_fields: bool = False
    vllm_metrics: bool = False
    max_waiting: int = 256
    max_streams_per_key: int = 256
    max_outputs_per_key: int = 1024
    max_body_bytes: int = 8 * 2**20
    max_n: int = 16
    max_prompts: int = 256
    max_request_tokens: int | None = None
    receive_timeout: float = 60.0
    request_timeout: float = 600.0
    drain_timeout: float = 60.0
    response_file: str | None = None
    max_response_bytes: int = 256 * 2**20
    max_response_age: float = 30 * 86400.0

    def __post_init__(self) -> None:
        need(isinstance(self.host, str) and self.host != "", "host", "be an address", self.host)
        integer("port", self.port, 0, 65535)
        for name in ("served_model_name", "api_key", "admin_key", "allowed_host", "allowed_origins"):
            texts = strings(name, getattr(self, name))
            need(all(text.strip() for text in texts), name, "not be empty; leave it out", "an empty text")
            vars(self)[name] = texts
        for one in self.allowed_origins:
            fine = re.fullmatch(ORIGIN, one) is not None
            need(fine, "allowed_origins", "hold origins, such as https://example.org, or *", one)
        choice("tool_call_parser", self.tool_call_parser, TOOL_FORMATS, optional=True)
        for name in ("log_requests", "allow_special_tokens", "strict_schemas", "lenient_fields", "vllm_metrics"):
            need(isinstance(getattr(self, name), bool), name, "be True or False", getattr(self, name))
        for name in MOST:
            integer(name, getattr(self, name), 1)
        if self.max_request_tokens is not None:
            integer("max_request_tokens", self.max_request_tokens, 1)
        for name in ("receive_timeout", "request_timeout", "drain_timeout", "max_response_age"):
            number(name, getattr(self, name), 0.0, math.inf, "be above 0", open_low=True)
        need(self.response_file != "", "response_file", "be a path; leave it out", self.response_file)
