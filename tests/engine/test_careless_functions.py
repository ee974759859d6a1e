"""What functions of a request's own may do: gradients, the words of errors, calls of the model, exits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from engine.harness import engine as bare_engine
from engine.harness import run
from engine.test_steering import HeadToy
from tiny_checkpoint import write

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.config import EngineConfig
from paceline.engine import Engine
from paceline.sampling.steering import Steering
from paceline.utils import described, one_line

Processor = Callable[[list[int], torch.Tensor], torch.Tensor]
PROMPTS = ["One day", "In the year", "She said"]
SINCE = 3


@cache
def tiny() -> LLM:
    return LLM(write(Path(mkdtemp(prefix="paceline-careless-"))), dtype="float32", threads=1, profile=False)


def params(*processors: Processor, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "logits_processors": list(processors), **more})


def since(work: Processor) -> Processor:
    """The processor from the fourth token on."""

    def careless(output: list[int], row: torch.Tensor) -> torch.Tensor:
        return work(output, row) if len(output) >= SINCE else row

    return careless


def together(processor: Processor) -> tuple[Any, list[Any]]:
    """The output of a request with the processor, and of two beside it, which are as they are alone."""
    alone = [one.outputs[0].token_ids for one in tiny().generate(PROMPTS, params())]
    each = tiny().generate(PROMPTS, [params(), params(since(processor)), params()])
    first, failing, last = (one.outputs[0] for one in each)
    assert [first.token_ids, last.token_ids] == [alone[0], alone[2]]
    assert failing.token_ids[:SINCE] == alone[1][:SINCE]
    return failing, alone[1]


class Wordless(Exception):
    """Raises where it is asked what happened."""

    def __str__(self) -> str:
        raise LookupError


def raising(error: Exception) -> Processor:
    def work(output: list[int], row: torch.Tensor) -> torch.Tensor:
        raise error

    return work


def test_logits_that_want_gradients_are_logits() -> None:
    """As of a module that shapes them; nothing of the step may depend on it."""
    weight = torch.nn.Parameter(torch.zeros(()))
    learned, plain = together(lambda output, row: row + weight)
    assert (learned.token_ids, learned.finish_reason, learned.error) == (plain, "length", None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64])
def test_what_is_no_floating_point_number_is_no_logit(dtype: torch.dtype) -> None:
    """A mask of what is allowed, for one, would make all that is allowed as likely."""
    failing, _ = together(lambda output, row: row.to(dtype))
    assert (len(failing.token_ids), failing.finish_reason) == (SINCE, "error")
    assert f"(TypeError: it must return logits of a floating-point dtype, got {dtype})" in failing.error
    half, plain = together(lambda output, row: row.double())
    assert (half.token_ids, half.error) == (plain, None)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("one\ntwo\r\n  three"), "(ValueError: one two three)"),
        (ValueError("long " * 1000), f"(ValueError: {'long ' * 39}lo...)"),
        (AssertionError(), "(AssertionError)"),
        (Wordless(), "(Wordless)"),
    ],
    ids=["lines", "length", "empty", "wordless"],
)
def test_the_words_of_an_error_are_one_short_line(error: Exception, words: str) -> None:
    failing, _ = together(raising(error))
    assert failing.error.endswith(f"careless failed {words}")
    (found,) = tiny().generate(
        PROMPTS[0],
        params(temperature=1.0),
        search={"method": "sample_and_rank", "num_samples": 2, "scorer": scorer(error)},
    )
    assert found.outputs[0].error == f"search method 'sample_and_rank' failed {words}"


def scorer(error: Exception) -> Callable[[list[str]], list[float]]:
    def score(texts: list[str]) -> list[float]:
        raise error

    return score


def test_the_name_of_an_error_stands_for_words_that_it_lacks() -> None:
    assert (described(KeyError("a")), one_line(KeyError("a"))) == ("KeyError: 'a'", "'a'")
    assert (described(Wordless()), one_line(Wordless()), one_line(ValueError(" \n"))) == (
        "Wordless",
        "Wordless",
        "ValueError",
    )


class Learned(Steering):
    """Shapes rows by a weight."""

    name = "learned"

    def shape(self, rows_rv: torch.Tensor, others: Any) -> torch.Tensor:
        return rows_rv * torch.nn.Parameter(torch.ones(()))


class Masking(Steering):
    """Returns what is allowed in place of how likely it is."""

    name = "masking"

    def shape(self, rows_rv: torch.Tensor, others: Any) -> torch.Tensor:
        return rows_rv > 0


def test_the_same_holds_for_steering() -> None:
    made = bare_engine(HeadToy(6, order=2))
    kinds = [None, {"method": f"{__name__}:Learned"}, {"method": f"{__name__}:Masking"}, None]
    live = Engine(made.parts, EngineConfig(), eos_ids=(0,))
    each = [params(steering=kind, logit_bias={0: -100.0}) for kind in kinds]
    plain, learned, masking, last = (one.outputs[0] for one in run(live, [[1, 2, 3]] * 4, each))
    assert plain.token_ids == learned.token_ids == last.token_ids
    assert masking.error.endswith("(TypeError: shape must return logits of a floating-point dtype, got torch.bool)")


# ------------------------------------------------------------------------------------------------ calls of the model


def decodes(row: torch.Tensor) -> torch.Tensor:
    tiny().generate("Once", params(max_tokens=2))
    return row


def streams(row: torch.Tensor) -> torch.Tensor:
    next(tiny().stream("Once", params(max_tokens=2)))
    return row


def twin(row: torch.Tensor) -> torch.Tensor:
    """Another engine around the same weights."""
    tiny().with_speculative_config(None).generate("Once", params(max_tokens=2))
    return row


@pytest.mark.parametrize("call", [decodes, streams, twin])
def test_a_processor_cannot_use_the_model_that_asks_it(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    failing, _ = together(lambda output, row: call(row))
    assert (len(failing.token_ids), failing.finish_reason) == (SINCE, "error")
    assert "(RuntimeError: an LLM cannot be used in the middle of its own step, got " in failing.error
    assert not tiny().engine.has_work


def test_functions_of_a_search_may_use_the_model() -> None:
    """They are asked between steps."""

    def score(texts: list[str]) -> list[float]:
        tiny().generate(["Once", "It is"], params(max_tokens=3))
        return [float(len(text)) for text in texts]

    def found(scorer: Any) -> list[Any]:
        search = {"method": "sample_and_rank", "num_samples": 3, "scorer": scorer}
        outputs = tiny().generate(PROMPTS, params(temperature=1.0, seed=5), search=search)
        return [(one.outputs[0].token_ids, one.outputs[0].error) for one in outputs]

    assert found(score) == found(lambda texts: [float(len(text)) for text in texts])


# ------------------------------------------------------------------------------------------------ exits


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
def test_the_engine_thread_outlives_what_a_function_raises(error: BaseException) -> None:
    """Such errors end a program, not the thread that others wait for."""

    def leaves(output: list[int], row: torch.Tensor) -> torch.Tensor:
        raise error

    async def last(model: AsyncLLM, sampling: SamplingParams) -> Any:
        return [one async for one in model.generate(PROMPTS[0], sampling)][-1].outputs[0]

    async def both() -> tuple[Any, Any]:
        model = AsyncLLM(tiny())
        ended = await asyncio.wait_for(last(model, params(since(leaves))), 30)
        assert model.faults == 1
        return ended, await asyncio.wait_for(last(model, params()), 30)

    ended, after = asyncio.run(both())
    assert ended.finish_reason == "error"
    assert ended.error.startswith(f"a step was cut short by {type(error).__name__}")
    assert after.token_ids == tiny().generate(PROMPTS[0], params())[0].outputs[0].token_ids
