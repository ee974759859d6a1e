"""The front door: `LLM(...).generate / .stream / .chat`, with results shaped as vLLM's."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator, Mapping, Sequence
from copy import copy
from itertools import count
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.diffusion import DiffusionEngine, check_kind
from paceline.engine import (
    DraftModels,
    Driver,
    Engine,
    Exactness,
    Prompt,
    Request,
    RequestOutput,
    StreamChunk,
    Turns,
    as_list,
    build_parts,
    check_methods,
    check_prompt,
    find_exactness,
    one_prompt,
    params_for,
    read_prompt,
)
from paceline.errors import CapabilityError
from paceline.models import load_runner
from paceline.models.denoiser import is_denoiser
from paceline.models.loading import BUNDLED_FOLDER, GenerationDefaults, Tokenizer, check_names, read_config, resolve
from paceline.profiles import DEFAULT, Profile, adopt
from paceline.sampling import draw_seed
from paceline.utils import clear_calls, need

logger = logging.getLogger("paceline")

BUNDLED = BUNDLED_FOLDER


@clear_calls()
class LLM:
    """A language model that decodes faster with the same output.

    Threads may share one: requests of all of them are decoded together, a step at a time, and each gets its own
    results.

    Args:
        model: folder or hub id of a Hugging Face checkpoint, or "bundled/NAME"; None is the bundled autoregressive
            model.
        speculative_config: vLLM's dialect as dict or JSON; {"method": "auto"} by default, None is plain decoding.
            Where it is not given, a profile that `paceline tune` made for this model, device, dtype and threads
            replaces it.
        diffusion_config: of a diffusion language model: its method and options as dict or JSON (`diffusion.methods`).
        tokenizer: folder or hub id, where it is not the model's own.
        revision: branch, tag or commit on the hub.
        gguf_file: the file meant where `model` is a folder or repository of GGUF files.
        lora: folder of a LoRA adapter in PEFT's format, which is merged into the weights.
        dtype, device, max_model_len, max_num_seqs, max_num_batched_tokens, enable_prefix_caching,
            kv_cache_memory_bytes, speculative_memory_bytes, threads, seed, exactness, quantization: see `EngineConfig`.
        trust_remote_code: run code that comes with the checkpoint (transformers fallback only).
        profile: look for such a profile.

    Attributes:
        profile: the one in use, or None.
        default_draft: folder of the draft model that ships with this target, or None.
        exactness: "strict, proven by self-test", or "up to near ties" and why.
        models: opens models beside the target, each once for all engines around these weights.
        diffusion: what decodes where the model is a diffusion language model, which has none of the engine's parts;
            else None.

    Raises:
        CheckpointError: nothing to load there, or not enough memory.
        ConfigError: a bad argument.
    """

    profile: Profile | None = None
    diffusion: DiffusionEngine | None = None
    _predicting: Driver | None = None  # beside a profile that reads no predictions

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        speculative_config: Mapping[str, Any] | str | SpeculativeConfig | None = DEFAULT,
        diffusion_config: Mapping[str, Any] | str | None = None,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        gguf_file: str | None = None,
        lora: str | Path | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: int | None = None,
        speculative_memory_bytes: int | None = None,
        threads: int | None = None,
        seed: int | None = None,
        exactness: str = "auto",
        quantization: str | None = None,
        trust_remote_code: bool = False,
        profile: bool = True,
    ) -> None:
        self.config = EngineConfig(
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            speculative_memory_bytes=speculative_memory_bytes,
            threads=threads,
            seed=seed,
            exactness=exactness,
            quantization=quantization,
        )
        self.speculative, self._diffusion_config = SpeculativeConfig.parse(speculative_config), diffusion_config
        self._by_default, self._trust, self._turns = speculative_config is DEFAULT, trust_remote_code, Turns()
        self._lora = lora
        self._open(model, tokenizer, revision, gguf_file, profile=profile)

    def _open(
        self,
        model: str | Path | None,
        tokenizer: str | Path | None,
        revision: str | None,
        gguf_file: str | None,
        *,
        profile: bool,
    ) -> None:
        """Load the model and build the engine around it."""
        check_names(model=model, tokenizer=tokenizer, revision=revision)
        need(gguf_file is None or isinstance(gguf_file, str), "gguf_file", "be the name of a file", gguf_file)
        need(self._lora is None or isinstance(self._lora, str | Path), "lora", "be a folder", self._lora)
        for key, value in (("profile", profile), ("trust_remote_code", self._trust)):
            need(isinstance(value, bool), key, "be True or False", value)
        check_methods(self.speculative)
        self.default_draft = str(BUNDLED / "draft") if model is None else None
        self._load(str(BUNDLED / "target") if model is None else str(model), tokenizer, revision, gguf_file)
        if profile and self._by_default and self.diffusion is None:
            self._adopt_profile()
        if self.diffusion is None:
            self._assemble()
        self._seed = draw_seed(self.config.seed if self.config.seed is not None else secrets.randbits(62), 0)
        self._count = count()

    def _load(self, name: str, tokenizer: str | Path | None, revision: str | None, gguf_file: str | None) -> None:
        """Read the checkpoint: tokenizer, defaults, weights."""
        if self.config.threads is not None:
            import torch

            torch.set_num_threads(self.config.threads)
        self.folder = folder = resolve(name, revision=revision, code=self._trust, gguf_file=gguf_file)
        config = read_config(folder)  # what is not supported often has no tokenizer, which would be missed first
        chosen = None if self._by_default else self.speculative
        check_kind(name, is_denoiser(config), chosen, self._diffusion_config)
        words = folder if tokenizer is None else resolve(str(tokenizer))
        self.tokenizer = Tokenizer.load(words, trust_remote_code=self._trust)
        self.defaults = GenerationDefaults.load(folder, self.tokenizer)
        if is_denoiser(config):
            need(self._lora is None, "lora", "be left out for a diffusion language model", self._lora)
            engine, own = self.config, self._diffusion_config
            self.diffusion = DiffusionEngine.load(folder, self.tokenizer, self.defaults, engine, own, name=name)
            self.speculative, self.defaults = None, self.diffusion.defaults
            return
        self.runner = load_runner(
            folder,
            name=name,
            dtype=self.config.dtype,
            device=self.config.device,
            max_context=self.config.max_model_len,
            trust_remote_code=self._trust,
            exactness=self.config.exactness,
            quantization=self.config.quantization,
            lora=self._lora,
        )
        self.models = DraftModels(
            folder, self.tokenizer, self.runner.info, self.config, trust_remote_code=self._trust, lora=self._lora
        )
        self._exact: list[Exactness] = []
        if self.config.exactness == "strict":
            _ = self.exactness

    def _adopt_profile(self) -> None:
        self.profile = adopt(self.runner.info, self.folder, threads=self.config.threads)
        if self.profile is not None:
            self.speculative = self.profile.speculative

    @property
    def exactness(self) -> Exactness:
        """What holds between plain and accelerated decoding.



        Found out at first use by a self-test, and kept on disk.
        """
        self._must_draft("exactness")
        if not self._exact:
            with self._turns.turn():
                self._exact.append(find_exactness(self.runner, self.config.exactness))
        return self._exact[0]

    def _assemble(self) -> None:
        """Build the engine for the present speculative_config around the loaded runner."""
        self.drafter_methods, parts = build_parts(
            self.runner,
            self.speculative,
            default_draft=self.default_draft,
            load=self.models.open,
            models=self.models,
            tokenizer=self.tokenizer,
            memory=self.config.speculative_memory_bytes,
        )
        self.engine = Engine(parts, self.config, tokenizer=self.tokenizer, eos_ids=self.defaults.eos_ids)
        self._driver = Driver(self.engine, self._turns)

    def with_speculative_config(self, speculative_config: Mapping[str, Any] | str | SpeculativeConfig | None) -> LLM:
        """The same loaded model under another speculative_config: another engine around the same weights."""
        self._must_draft("with_speculative_config")
        other = copy(self)
        other.speculative, other.profile = SpeculativeConfig.parse(speculative_config), None
        other._assemble()
        return other

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Decode all prompts to their ends; results in the order of the prompts.

        Args:
            prompts: one or many; each a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}; a
                dict may also hold `prediction` and `cache_salt` (see `engine.prompts.read_prompt`).
            sampling_params: one for all or one each; None takes the checkpoint's generation_config.json.
        Raises:
            PromptError, ConfigError: before anything runs.
        """
        items = as_list(prompts)
        params = self._params(sampling_params, len(items))
        requests = [self._request(item, one) for item, one in zip(items, params, strict=True)]
        if self.diffusion:
            self.diffusion.run(requests)
        else:
            self._serving(requests).run(requests)
        return [request.result() for request in requests]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered by the checkpoint's own chat template.

        Raises:
            ConfigError: the checkpoint has no chat template.
        """
        fine = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
        need(messages != [], "messages", "hold a message or more", messages)
        need(fine, "messages", "be a list of dicts with 'role' and 'content', or a list of such lists", messages)
        talks = [messages] if isinstance(messages[0], Mapping) else list(messages)
        prompts = [{"prompt_token_ids": self.chat_ids(talk, **template)} for talk in talks]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[StreamChunk]:
        """Decode one prompt and yield what each step adds.

        Closing the iterator, or forgetting it, cancels the request.
        """
        (params,) = self._params(sampling_params, 1)
        request = self._request(one_prompt(prompt), params)
        if self.diffusion:
            return self.diffusion.stream(request)
        driver = self._serving([request])
        driver.engine.check(request)
        return driver.stream(request)

    def save_tables(self, folder: str | Path | None = None) -> list[Path]:
        """Write what the drafters have learned from the texts so far; returns the files.

        Args:
            folder: None takes the one that speculative_config gives as `tables`, where they are read at the start.
        Raises:
            DrafterError: no folder, or it cannot be written.
        """
        self._must_draft("save_tables")
        with self._turns.turn():
            return self.engine.parts.drafter_set.save_tables(folder)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Token ids of a conversation, ready for an answer."""
        return self.tokenizer.encode(self.tokenizer.apply_chat_template(messages, **template), add_special_tokens=False)

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults, with changes."""
        return SamplingParams.from_dict({**self.defaults.sampling, **changes})

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, number: int) -> list[SamplingParams]:
        return params_for(self.default_sampling_params() if given is None else given, number)

    def _must_draft(self, what: str) -> None:
        """Reject what only models with an engine have."""
        if self.diffusion:
            raise CapabilityError(
                f"{what} is only available for autoregressive models, and {self.folder} is a diffusion language model"
            )

    def _serving(self, requests: Sequence[Request]) -> Driver:
        """Who decodes these together. A profile is the machine's choice and was made without predictions: where its
        methods read none, requests with some are drafted for from these alone. Methods that the user chose are used as
        they are.
        """
        if "prediction" in self.drafter_methods or not any(request.prediction for request in requests):
            return self._driver
        if self.profile is not None:
            with self._turns.turn():
                if self._predicting is None:
                    self._predicting = self.with_speculative_config({"method": "prediction"})._driver
            return self._predicting
        if self.drafter_methods:
            logger.warning(
                "a prediction is ignored, since none of the methods %s uses it; add the method prediction",
                self.drafter_methods,
            )
        return self._driver

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        read = read_prompt(prompt, self.tokenizer.encode)
        info, serial = self.diffusion or self.runner.info, next(self._count)
        room = check_prompt(read.tokens, info.vocab_size, info.max_context, params.max_tokens, read.prediction)
        seed = params.seed if params.seed is not None else draw_seed(self._seed, serial)
        return Request(f"request-{serial}", read.text, read.tokens, params, seed, room, read.tenant, read.prediction)
