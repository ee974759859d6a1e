"""The front door: `LLM(...).generate / .stream / .chat`, with results shaped as vLLM's."""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from copy import copy
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from paceline.arguments import CALLS, IDLE_CALLS, Meant, Named, absent, chat_names, translated
from paceline.assembly import (
    DraftModels,
    Exactness,
    build_parts,
    check_methods,
    find_exactness,
    open_kv_selection,
    open_skipping,
    reject_approximate,
    reject_routing,
    reject_unsteady,
)
from paceline.checkpoints import (
    BUNDLED_FOLDER,
    GenerationDefaults,
    Tokenizer,
    check_names,
    is_denoiser,
    read_config,
    resolve,
    writes_times,
)
from paceline.config import EmbeddingParams, EngineConfig, GivenConfig, SamplingParams, SpeculativeConfig
from paceline.diffusion import DiffusionDriver, DiffusionEngine, check_kind
from paceline.engine import (
    Backend,
    EmbeddingRequestOutput,
    EmbeddingRun,
    Engine,
    EngineDriver,
    Prompt,
    ReadPrompt,
    Request,
    RequestOutput,
    RolloutPool,
    SourceReader,
    StreamChunk,
    Turns,
    as_list,
    check_prompt,
    one_prompt,
    params_for,
    read_prompt,
    readable,
    rollout_params,
    set_priorities,
    shaped,
    truncated,
)
from paceline.errors import CapabilityError, ConfigError
from paceline.models import EndsPrompts, load_runner
from paceline.profiles import DEFAULT, Profile, adopt
from paceline.sampling import draw_seed
from paceline.search import (
    BeamSearchOutput,
    BeamSearchParams,
    GivenRetrieval,
    GivenSearch,
    SearchConfig,
    SearchDriver,
    SearchRequest,
    retrievals_for,
    searches_for,
)
from paceline.utils import about_item, check_bar, choice, clear_calls, integer, need, request_bar

if TYPE_CHECKING:
    from paceline.live_transcriber import LiveTranscriber
    from paceline.speech import AudioLimits, AudioSource, Transcript

logger = logging.getLogger("paceline")

BUNDLED = BUNDLED_FOLDER
OF_THE_MODEL = ("backend", "engine", "runner", "models")


@clear_calls(meant=CALLS, neutral=IDLE_CALLS)
class LLM(metaclass=Named):
    """A language model that decodes faster with the same output.

    Threads may share one: requests of all of them are decoded together, a step at a time, and each gets its own
    results. Arguments that are not described here are fields of `EngineConfig`, which says what each does: sizes of the
    engine, and forms of its weights.

    Args:
        model: folder or hub id of a Hugging Face checkpoint, or "bundled/NAME"; None is the bundled autoregressive
            model.
        speculative_config: vLLM's dialect as dict or JSON, the name of a method, or a list of methods;
            {"method": "auto"} by default, None is plain decoding. Where it is not given, a profile that `paceline tune`
            made for this model, device, dtype and threads replaces it.
        diffusion_config: of a diffusion language model: its method and options as dict or JSON (`diffusion.methods`).
        tokenizer: folder or hub id, where it is not the model's own.
        revision: branch, tag or commit on the hub.
        gguf_file: the file meant where `model` is a folder or repository of GGUF files.
        lora: folder of a LoRA adapter in PEFT's format, which is merged into the weights.
        trust_remote_code: run code that comes with the checkpoint (transformers fallback only).
        profile: look for such a profile.
        others: arguments of vLLM and transformers that change nothing here, which one warning names; all others are
            rejected together (`arguments`). `torch_dtype` is `dtype`, and `device_map` is `device`.

    Attributes:
        profile: the one in use, or None.
        source: how prompts of an encoder-decoder model are read; None for all others.
        default_draft: folder of the draft model that ships with this target, or None.
        exactness: "strict, proven by self-test", or "up to near ties" and why.
        backend: decodes, whatever kind of model it is.
        models: opens models beside the target, each once for all engines around these weights.
        diffusion: what decodes where the model is a diffusion language model, which has none of the engine's parts;
            else None.

    Raises:
        CheckpointError: nothing to load there, or not enough memory.
        ConfigError: a bad argument.
    """

    profile: Profile | None = None
    source: SourceReader | None = None
    closed = False
    backend: Backend
    diffusion: DiffusionEngine | None = None
    _searching: SearchDriver | None = None  # of models that can be searched with
    _predicting: Backend | None = None  # beside a profile that reads no predictions
    _told_of_prediction = False  # that one was ignored

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        speculative_config: GivenConfig = DEFAULT,
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
        activation_bits: int | None = None,
        kv_selection: Mapping[str, Any] | str | None = None,
        skipping: Mapping[str, Any] | str | None = None,
        trust_remote_code: bool = False,
        profile: bool = True,
        **others: Any,
    ) -> None:
        ours = Meant(dtype, device, max_model_len, threads)
        meant = translated(others, ours, own=_own_arguments(), cuda=torch.cuda.is_available())
        self.config = _engine_config(
            dtype=meant.dtype, device=meant.device, max_model_len=meant.max_model_len, threads=meant.threads, seed=seed,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching, kv_cache_memory_bytes=kv_cache_memory_bytes,
            speculative_memory_bytes=speculative_memory_bytes, exactness=exactness, quantization=quantization,
            activation_bits=activation_bits, kv_selection=kv_selection, skipping=skipping,
        )  # fmt: skip
        self.speculative, self._diffusion_config = SpeculativeConfig.parse(speculative_config), diffusion_config
        self._by_default, self._trust, self.turns = speculative_config is DEFAULT, trust_remote_code, Turns()
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
        need(gguf_file is None or model is not None, "gguf_file", "be given together with model", gguf_file)
        need(self._lora is None or isinstance(self._lora, str | Path), "lora", "be a folder", self._lora)
        for key, value in (("profile", profile), ("trust_remote_code", self._trust)):
            need(isinstance(value, bool), key, "be True or False", value)
        check_methods(self.speculative)
        self.default_draft = str(BUNDLED / "draft") if model is None else None
        name = str(BUNDLED / "target") if model is None else str(model)
        self._load(name, tokenizer, revision, gguf_file, profile=profile)
        self._seed = draw_seed(self.config.seed if self.config.seed is not None else secrets.randbits(62), 0)
        self._count = count()

    def _load(
        self, name: str, tokenizer: str | Path | None, revision: str | None, gguf_file: str | None, *, profile: bool
    ) -> None:
        """Read the checkpoint, its tokenizer and defaults first, and open the backend of its kind."""
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self.folder = folder = resolve(name, revision=revision, code=self._trust, gguf_file=gguf_file)
        config = read_config(folder)  # what is not supported often has no tokenizer, which would be missed first
        chosen = None if self._by_default else self.speculative
        check_kind(name, is_denoiser(config), chosen, self._diffusion_config)
        words = folder if tokenizer is None else resolve(str(tokenizer))
        self.tokenizer = Tokenizer.load(words, trust_remote_code=self._trust)
        self.defaults = GenerationDefaults.load(folder, self.tokenizer)
        if is_denoiser(config):
            self._open_denoiser(name)
        else:
            self._open_runner(name, config, profile=profile and self._by_default)

    def _open_denoiser(self, name: str) -> None:
        need(self._lora is None, "lora", "be left out for a diffusion language model", self._lora)
        self.diffusion = DiffusionEngine.load(
            self.folder, self.tokenizer, self.defaults, self.config, self._diffusion_config, name=name
        )
        self.speculative, self.defaults = None, self.diffusion.defaults
        self.backend = DiffusionDriver(self.diffusion, self.turns)

    def _open_runner(self, name: str, config: Mapping[str, Any], *, profile: bool) -> None:
        self.runner = load_runner(
            self.folder,
            name=name,
            dtype=self.config.dtype,
            device=self.config.device,
            max_context=self.config.max_model_len,
            trust_remote_code=self._trust,
            exactness=self.config.exactness,
            quantization=self.config.quantization,
            activation_bits=self.config.activation_bits,
            lora=self._lora,
            kv_selection=open_kv_selection(self.config.kv_selection, exactness=self.config.exactness),
            skipping=open_skipping(self.config.skipping, exactness=self.config.exactness),
            tokens=None if writes_times(config) else 1 + max((*self.tokenizer.tokens(), *self.defaults.eos_ids)),
        )
        self.models = DraftModels(
            self.folder, self.tokenizer, self.runner.info, self.config, trust_remote_code=self._trust, lora=self._lora
        )
        self._exact: list[Exactness] = []
        if self.config.exactness == "strict":
            self._find_exactness()
        if reads := self.runner.info.source:
            self.source = SourceReader(reads, self.tokenizer.encode, self.defaults.decoder_start_ids)
        if profile:
            self._adopt_profile()
        self._assemble()

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
        return self._find_exactness()

    def _find_exactness(self) -> Exactness:
        if not self._exact:
            with self.turns.turn():
                self._exact.append(find_exactness(self.runner, self.config.exactness))
        return self._exact[0]

    def _assemble(self) -> None:
        """Build the engine for the present speculative_config around the loaded runner."""
        if self.config.exactness == "strict" and self.speculative is not None:
            reject_approximate(self.speculative.acceptance_method)
            reject_unsteady(self.speculative)
        self.drafter_methods, parts = build_parts(
            self.runner,
            self.speculative,
            default_draft=self.default_draft,
            load=self.models.open,
            models=self.models,
            tokenizer=self.tokenizer,
            memory=self.config.speculative_memory_bytes,
        )
        self.engine = Engine(
            parts, self.config, tokenizer=self.tokenizer, eos_ids=self.defaults.eos_ids, models=self.models
        )
        self.backend = driver = EngineDriver(self.engine, self.turns)
        self._searching = SearchDriver(driver, self.turns, self.models)

    @property
    def backends(self) -> list[Backend]:
        """All that decode with this model, the ordinary one first."""
        return [one for one in (self.backend, self._predicting, self._searching) if one is not None]

    def with_speculative_config(self, speculative_config: GivenConfig) -> LLM:
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
        use_tqdm: bool | Callable[..., Any] | None = None,
        *,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        search: GivenSearch | Sequence[GivenSearch] | None = None,
        retrieval: GivenRetrieval | Sequence[GivenRetrieval] | None = None,
    ) -> list[RequestOutput]:
        """Decode all prompts to their ends; results in the order of the prompts.

        Args:
            prompts: one or many; each a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}; a
                dict may also hold `prediction`, `cache_salt` and `speculative_config` (see
                `engine.prompts.read_prompt`).
            sampling_params: one for all or one each; None takes the checkpoint's generation_config.json.
            use_tqdm: show a progress bar; None shows one for several prompts on a terminal. A class or function is
                called in the place of tqdm.
            lora_request: vLLM's; must be None (an adapter is merged into the weights, `lora`).
            priority: one number for each prompt; those with the lowest begin first, all others in their order.
            search: a method of search, or a dict with its options: {"method": "beam", "beam_width": 4}
                (`paceline.search.SearchConfig`); one for all prompts, or a list with one each. The best `n` texts of
                each prompt are its outputs, each with a score; nothing is drafted. None decodes token by token.
            retrieval: write with what an index finds while the text goes on: the folder of an index (`paceline
                retrieval build`), or a dict with it and options of the methods `ralm` and `knn_lm`: {"index": FOLDER,
                "interval": 4}; one for all prompts, or a list with one each. Not together with `search`.
        Raises:
            PromptError, ConfigError: before anything runs.
        """
        self._must_be_open()
        read, given = list[ReadPrompt](), as_list(prompts)
        for number, item in enumerate(given):
            with about_item("prompts", number, len(given)):
                read.append(self._read(item))
        return self._run(
            read, sampling_params, use_tqdm, lora_request, search=search, retrieval=retrieval, priority=priority
        )

    def _read(self, prompt: Prompt) -> ReadPrompt:
        return read_prompt(prompt, self.tokenizer.encode, self.source)

    def _run(
        self,
        prompts: Sequence[ReadPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any] | None,
        lora_request: object,
        *,
        search: GivenSearch | Sequence[GivenSearch] | None,
        retrieval: GivenRetrieval | Sequence[GivenRetrieval] | None,
        priority: Sequence[int] | None = None,
        argument: str = "prompts",
    ) -> list[RequestOutput]:
        """Decode prompts to their ends.

        Args:
            argument: that they came as, for errors.
        """
        rule = "be None: an adapter is merged into the weights, with LLM(model, lora=FOLDER)"
        need(lora_request is None, "lora_request", rule, lora_request)
        check_bar(use_tqdm)
        params = self._params(sampling_params, len(prompts))
        searches = self._searches(search, params, retrieval)
        requests = list[Request]()
        for number, each in enumerate(zip(prompts, params, searches, strict=True)):
            with about_item(argument, number, len(prompts)):
                requests.append(self._request(*each))
        if priority is not None:
            set_priorities(requests, priority)
        backend = self._backend_for(requests)
        with request_bar(len(requests), use_tqdm) as advance:
            backend.run(sorted(requests, key=lambda request: request.priority), advance)
        results = [request.result() for request in requests]
        _warn_of_errors(results)
        return results

    def _searches(
        self,
        given: GivenSearch | Sequence[GivenSearch] | None,
        params: Sequence[SamplingParams],
        retrieval: GivenRetrieval | Sequence[GivenRetrieval] | None,
    ) -> list[SearchConfig] | list[None]:
        """The search of each request with these parameters; of a list, one each."""
        if given is None and retrieval is None:
            return [None] * len(params)
        need(given is None or retrieval is None, "retrieval", "be left out with search", retrieval)
        self._must_draft("search" if retrieval is None else "retrieval")
        configs = searches_for(given, params) if given is not None else retrievals_for(retrieval or {}, params)
        if self.config.exactness == "strict":
            for config in configs:
                reject_routing(config.method)
        return configs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., Any] | None = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Beam search in vLLM's form: the `beam_width` likeliest texts of each prompt, best first.

        Args:
            concurrency_limit: prompts that are searched for side by side; None is all.
        Raises:
            PromptError, ConfigError: before anything runs.
        """
        need(isinstance(params, BeamSearchParams), "params", "be BeamSearchParams", params)
        if concurrency_limit is not None:
            integer("concurrency_limit", concurrency_limit, 1)
        listed, found = as_list(prompts), list[RequestOutput]()
        size = concurrency_limit or max(1, len(listed))
        for start in range(0, len(listed), size):
            found += self.generate(
                listed[start : start + size], params.sampling_params(), use_tqdm, lora_request=lora_request,
                search=params.search(),
            )  # fmt: skip
        return [BeamSearchOutput.of(one) for one in found]

    def rollouts(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        segment_tokens: int,
        pool_size: int | None = None,
    ) -> RolloutPool:
        """Samples for training, decoded in segments, so that none is waited for: see `RolloutPool`.

        Args:
            prompts: taken as places get free; each as in `generate`, or a single one.
            sampling_params: of all; `logprobs` counts as 0 where it is None.
            segment_tokens: most new tokens of a sample in a step.
            pool_size: most samples side by side; None is `max_num_seqs`, or the samples of a prompt if those are more.
        Raises:
            ConfigError: a value outside its range.
            CapabilityError: a diffusion language model.
        """
        self._must_draft("rollouts")
        (params,) = self._params(sampling_params, 1)
        params = rollout_params(params)
        size = max(self.config.max_num_seqs, params.n) if pool_size is None else pool_size
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]

        def submit(prompt: Prompt) -> tuple[Request, EngineDriver]:
            request, driver = self.request(prompt, params)
            assert isinstance(driver, EngineDriver)
            return request, driver

        return RolloutPool(
            submit, self.reset_prefix_cache, prompts, samples=params.n, segment_tokens=segment_tokens, pool_size=size
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        *,
        lora_request: None = None,
        chat_template_content_format: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        search: GivenSearch | Sequence[GivenSearch] | None = None,
        retrieval: GivenRetrieval | Sequence[GivenRetrieval] | None = None,
        allow_special_tokens: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered by the checkpoint's own chat template.

        Args:
            messages: dicts with "role" and "content", or lists of such dicts.
            sampling_params, use_tqdm, lora_request, priority, search, retrieval: as in `generate`.
            chat_template_content_format: "auto": contents go to the template in the form that it takes.
            chat_template_kwargs: names for the template, such as `enable_thinking`.
            allow_special_tokens: what messages spell like special tokens (`<|im_end|>`) becomes them; else it is text,
                and special tokens are the template's own alone.
            template: `chat_template`, `add_generation_prompt`, `continue_final_message`, `tools`
                (`Tokenizer.apply_chat_template`), and names for the template.
        Raises:
            ConfigError: the checkpoint has no chat template, or neither it nor this method knows an argument.
        """
        self._must_be_open()
        choice("chat_template_content_format", chat_template_content_format, ("auto",))
        fine = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
        need(messages != [], "messages", "hold a message or more", messages)
        need(fine, "messages", "be a list of dicts with 'role' and 'content', or a list of such lists", messages)
        talks: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        need(isinstance(allow_special_tokens, bool), "allow_special_tokens", "be True or False", allow_special_tokens)
        names = chat_names(LLM.chat, self.tokenizer, template, chat_template_kwargs)
        names["allow_special_tokens"] = allow_special_tokens
        prompts = list[ReadPrompt]()
        for number, talk in enumerate(talks):
            with about_item("messages", number, len(talks)):
                prompts.append(ReadPrompt(*self.tokenizer.encode_chat(talk, **names), []))
        return self._run(
            prompts, sampling_params, use_tqdm, lora_request, search=search, retrieval=retrieval, priority=priority,
            argument="messages",
        )  # fmt: skip

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each text: the model's states behind the final norm, pooled; in the order of the prompts.

        Texts are read beside running requests, a pass of at most `max_num_batched_tokens` at a time.

        Args:
            prompts: one or many, as in `generate`.
            pooling: "last", the state of a text's last token, or "mean" of all its tokens.
            normalize: make each embedding's length 1.
            dimensions: keep so many first numbers, and normalise these; None keeps all.
            truncate_prompt_tokens: read the last so many tokens of a text; -1 is as many as the model takes; None
                rejects texts that are longer than that.
            use_tqdm: as in `generate`.
        Returns:
            Outputs in vLLM's form: the numbers are `output.outputs.embedding`.
        Raises:
            PromptError, ConfigError: before anything runs.
            CapabilityError: a diffusion language model, or one whose states cannot be had.
        """
        check_bar(use_tqdm)
        params = EmbeddingParams(
            pooling=pooling, normalize=normalize, dimensions=dimensions, truncate_prompt_tokens=truncate_prompt_tokens
        )
        with closing(self.embedding_run(prompts, params)) as run, request_bar(run.count, use_tqdm) as advance:
            while not run.ended:
                self._must_be_open()
                run.step()
                if advance is not None:
                    advance(run.done, run.tokens_read)
        return run.results()

    def embedding_run(self, prompts: Prompt | Sequence[Prompt], params: EmbeddingParams) -> EmbeddingRun:
        """Texts that are ready to be embedded, a pass of the model at a time; close it in any case.

        Raises:
            PromptError, ConfigError, CapabilityError: as `embed`.
        """
        self._must_draft("embed")
        if self.source is not None:
            raise CapabilityError(f"{self.folder} has an encoder and writes; load an embedding model to embed")
        info = self.backend.info
        read = [self._read(item) for item in as_list(prompts)]
        return EmbeddingRun(
            self.runner,
            self.turns,
            [readable(one, params, info.max_context, info.vocab_size) for one in read],
            params,
            most_tokens=self.config.max_num_batched_tokens,
            most_texts=self.config.max_num_seqs,
            name=f"embedding-{next(self._count)}",
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        search: GivenSearch | None = None,
        retrieval: GivenRetrieval | None = None,
    ) -> Generator[StreamChunk]:
        """Decode one prompt and yield what each step adds.

        Closing the iterator, or forgetting it, cancels the request.

        Args:
            search: as in `generate`. What all texts that are still in question begin with comes as soon as the method
                can tell, as the beginning of the best one; all else at the end.
            retrieval: as in `generate`; what is told has been verified.
        """
        request, backend = self.request(prompt, sampling_params, search, retrieval=retrieval)
        return shaped(backend.stream(request), request.params.output_kind)

    def request(
        self,
        prompt: Prompt | ReadPrompt,
        sampling_params: SamplingParams | None = None,
        search: GivenSearch | None = None,
        *,
        retrieval: GivenRetrieval | None = None,
    ) -> tuple[Request, Backend]:
        """A request, checked and not begun, and what decodes it.

        Args:
            prompt: as in `stream`, or one that was read already. search, retrieval: as in `generate`.
        Raises:
            PromptError, ConfigError: it cannot be decoded.
        """
        self._must_be_open()
        (params,) = self._params(sampling_params, 1)
        (config,) = self._searches(search, [params], retrieval)
        read = prompt if isinstance(prompt, ReadPrompt) else self._read(one_prompt(prompt))
        request = self._request(read, params, config)
        backend = self._backend_for([request])
        backend.check(request)
        return request, backend

    def save_tables(self, folder: str | Path | None = None) -> list[Path]:
        """Write what the drafters have learned from the texts so far; returns the files.

        Args:
            folder: None takes the one that speculative_config gives as `tables`, where they are read at the start.
        Raises:
            DrafterError: no folder, or it cannot be written.
        """
        self._must_draft("save_tables")
        with self.turns.turn():
            return self.engine.parts.drafter_set.save_tables(folder)

    def transcribe(
        self,
        audio: AudioSource | Sequence[AudioSource],
        *,
        sample_rate: int = 16_000,
        limits: AudioLimits | None = None,
        **params: Any,
    ) -> Transcript | list[Transcript]:
        """The text of speech, by a Whisper model: of one audio, or of a list.

        Args:
            audio: the path of a file, its bytes, an open one, or samples as a NumPy array (`speech.load_audio`).
            sample_rate: of samples. limits: of what is read.
            params: `language`, `timestamps`, `words` and the other fields of `TranscriptionParams`.
        Raises:
            PromptError: no audio, or beyond the limits.
            ConfigError: a model that reads no speech, or a parameter that is unknown or wrong.
        """
        self._must_be_open()
        from paceline.speech import load_audio
        from paceline.transcriber import Transcriber, TranscriptionParams

        wanted = TranscriptionParams.of_call("transcribe", params)
        transcriber, many = Transcriber(self), isinstance(audio, list | tuple)
        sources: Sequence[AudioSource] = audio if isinstance(audio, list | tuple) else [cast("AudioSource", audio)]
        heard = []
        for number, source in enumerate(sources):
            with about_item("audio", number, len(sources)):
                heard.append(load_audio(source, sample_rate=sample_rate, limits=limits))
        found = transcriber.transcribe(heard, wanted)
        return found if many else found[0]

    def captions(self, *, drafts: bool = True, longest: float = 15.0, **params: Any) -> LiveTranscriber:
        """Captions of audio that is still coming, by a Whisper model: `feed` samples, and `update` gives the words that
        have become final.

        Args:
            drafts: each transcript of the last seconds is drafted from the one before.
            longest: seconds of audio that are transcribed again and again.
            params: fields of `TranscriptionParams`, as of `transcribe`.
        Raises:
            ConfigError: a model that reads no speech, or a parameter that is unknown or wrong.
        """
        self._must_be_open()
        from paceline.live_transcriber import LiveTranscriber
        from paceline.transcriber import Transcriber, TranscriptionParams

        wanted = TranscriptionParams.of_call("captions", params)
        return LiveTranscriber(Transcriber(self), wanted, drafts=drafts, longest=longest)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Token ids of a conversation, ready for an answer (see `Tokenizer.encode_chat`)."""
        return self.tokenizer.encode_chat(messages, **template)[1]

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults, with changes."""
        return SamplingParams.from_dict({**self.defaults.sampling, **changes})

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name of `default_sampling_params`."""
        return self.default_sampling_params()

    def get_tokenizer(self) -> Any:
        """The tokenizer as an object of transformers; the engine's own is `tokenizer`."""
        self._must_be_open()
        return self.tokenizer.to_transformers()

    def reset_prefix_cache(self) -> bool:
        """Forget the keys and values of ended requests; whether there was such a cache."""
        self._must_be_open()
        return self.backend.reset_prefix_cache()

    def close(self) -> None:
        """End the running requests and let go of the model, whose memory is freed unless others share it.

        It never waits: where another thread is in the middle of a step, that is ended by that thread.
        """
        if self.closed:
            return
        self.closed = True
        for backend in self.backends:
            self.turns.soon(backend.close)
        for name in OF_THE_MODEL:
            vars(self).pop(name, None)
        self.diffusion = self._predicting = self._searching = None

    if not TYPE_CHECKING:  # a type checker shall go on to find what is not there

        def __getattr__(self, name: str) -> Any:
            """Called for what is not there: say why."""
            if name in OF_THE_MODEL and self.closed:
                raise AttributeError("this LLM is closed; open a new one")
            raise AttributeError(absent("LLM", name), name=name, obj=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _must_be_open(self) -> None:
        if self.closed:
            raise ConfigError("this LLM is closed; open a new one")

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, number: int) -> list[SamplingParams]:
        return params_for(self.default_sampling_params() if given is None else given, number)

    def _must_draft(self, what: str) -> None:
        """Reject what only models that can be drafted for have, and where it is closed."""
        self._must_be_open()
        if not self.backend.can_draft:
            raise CapabilityError(
                f"{what} is only available for autoregressive models, and {self.folder} is a diffusion language model"
            )

    def _backend_for(self, requests: Sequence[Request]) -> Backend:
        """Who decodes these together. A profile is the machine's choice and was made without predictions: where its
        methods read none, requests with some are drafted for from these alone. Methods that the user chose are used as
        they are. Requests with a search are all of one call.
        """
        if self._searching is not None and any(isinstance(request, SearchRequest) for request in requests):
            return self._searching
        if not any(request.prediction for request in requests) or not self.backend.can_draft:
            return self.backend
        if "prediction" in self.drafter_methods:
            return self.backend
        if self.profile is not None:
            with self.turns.turn():
                if self._predicting is None:
                    self._predicting = self.with_speculative_config({"method": "prediction"}).backend
            return self._predicting
        if not self._told_of_prediction:
            self._told_of_prediction = True
            methods = self.drafter_methods
            uses = f"none of the methods {methods} uses it; add the method prediction"
            why = uses if methods else "nothing is drafted"
            logger.warning("a prediction is ignored, since %s (said once)", why)
        return self.backend

    def _request(self, read: ReadPrompt, params: SamplingParams, search: SearchConfig | None = None) -> Request:
        params = copy(params)
        self.backend.check_params(params, read.drafts)
        info, serial, context = self.backend.info, next(self._count), self.backend.context_for(read.inputs)
        tokens = truncated(read.tokens, params, context)
        if self.diffusion is None and isinstance(self.runner, EndsPrompts):
            tokens = [*tokens, *self.runner.prompt_end]
        whole = len(tokens) == len(read.tokens) or not read.inputs.embeddings
        rule = "leave a prompt whole that has embeddings in it"
        need(whole, "truncate_prompt_tokens", rule, params.truncate_prompt_tokens)
        room = check_prompt(
            tokens,
            info.vocab_size,
            context,
            params.max_tokens,
            read.prediction,
            longest=None if self.config.max_model_len is None else info.declared_context,
            rope_border=info.rope_border,
        )
        seed = params.seed if params.seed is not None else draw_seed(self._seed, serial)
        given = f"request-{serial}", read.text, tokens, params, seed, room, read.tenant, read.prediction, read.drafts
        if search is None:
            return Request(*given, inputs=read.inputs, rule=read.rule)
        return SearchRequest(*given, inputs=read.inputs, rule=read.rule, search=search.open(), budget=search.budget)


def _warn_of_errors(results: Sequence[RequestOutput]) -> None:
    outputs = [one for result in results for one in result.outputs]
    if failed := [one.error for one in outputs if one.error is not None]:
        logger.warning(
            "%d of %d outputs ended with an error (attribute `error`; `raise_for_error`), the first: %s",
            len(failed), len(outputs), failed[0],
        )  # fmt: skip


def _engine_config(**given: Any) -> EngineConfig:
    """The sizes and forms that are given; None is the default."""
    return EngineConfig(**{key: value for key, value in given.items() if value is not None})


@cache
def _own_arguments() -> tuple[str, ...]:
    """The names of our own arguments of `LLM`."""
    return tuple(name for name in inspect.signature(LLM).parameters if name != "others")
