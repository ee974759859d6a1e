"""The digest of inputs is that of their contents, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from paceline.errors import PromptError
from paceline.models import NO_INPUTS, EmbeddedSpan, Inputs

SOUND = np.arange(12, dtype=np.float32).reshape(3, 4)
SCRIPT = """
import numpy as np
from paceline.models import EmbeddedSpan, Inputs
sound = np.arange(12, dtype=np.float32).reshape(3, 4)
print(Inputs([1, 2], {"b": sound, "a": sound.T}, [EmbeddedSpan(2, sound)]).digest)
"""


def spans(*starts: int) -> list[EmbeddedSpan]:
    return [EmbeddedSpan(start, SOUND) for start in starts]


DIFFERENT: dict[str, Inputs] = {
    "tokens": Inputs(encoder_tokens=[1, 2]),
    "other tokens": Inputs(encoder_tokens=[2, 1]),
    "features": Inputs(features={"sound": SOUND}),
    "another name": Inputs(features={"picture": SOUND}),
    "another number": Inputs(features={"sound": SOUND + 1}),
    "another shape": Inputs(features={"sound": SOUND.reshape(4, 3)}),
    "another type": Inputs(features={"sound": SOUND.astype(np.float64)}),
    "the same bits as integers": Inputs(features={"sound": SOUND.view(np.int32)}),
    "two": Inputs(features={"sound": SOUND, "sound2": SOUND}),
    "embeddings": Inputs(embeddings=spans(3)),
    "elsewhere": Inputs(embeddings=spans(4)),
    "in two places": Inputs(embeddings=spans(3, 6)),
    "nothing": NO_INPUTS,
}


def test_other_contents_have_other_digests() -> None:
    assert len({inputs.digest for inputs in DIFFERENT.values()}) == len(DIFFERENT)


def test_equal_contents_have_the_same_digest() -> None:
    one = Inputs((1, 2), {"b": SOUND, "a": SOUND.T}, spans(2))
    other = Inputs([1, 2], {"a": np.ascontiguousarray(SOUND.T), "b": SOUND.astype(">f4")}, tuple(spans(2)))
    assert one.digest == other.digest
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == one.digest
    assert Inputs().digest == NO_INPUTS.digest == ""


def test_contents_are_copied() -> None:
    array = SOUND.copy()
    inputs = Inputs(features={"sound": array})
    array[0, 0] = 99
    assert inputs.features["sound"][0, 0] == 0
    assert inputs.digest == DIFFERENT["features"].digest
    with pytest.raises(ValueError, match="read-only"):
        inputs.features["sound"][0, 0] = 99


def test_messages_name_what_there_is() -> None:
    inputs = Inputs([1, 2], {"sound": SOUND}, spans(3))
    assert inputs.kinds == ("encoder_tokens", "features", "embeddings")
    assert inputs.described() == "encoder_tokens (2 ids), features (sound (3, 4)), embeddings (at 3..5)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"encoder_tokens": [1, -1]}, "encoder_tokens must be integers"),
        ({"encoder_tokens": [True]}, "encoder_tokens must be integers"),
        ({"features": {"sound": [1.0]}}, "'sound' must be a NumPy array of numbers"),
        ({"features": {"sound": np.array(["a"])}}, "'sound' must be a NumPy array of numbers"),
        ({"embeddings": [EmbeddedSpan(0, SOUND[0])]}, "embeddings must be floating-point arrays"),
        ({"embeddings": [EmbeddedSpan(0, SOUND.astype(np.int64))]}, "embeddings must be floating-point arrays"),
        ({"embeddings": spans(0, 2)}, "in order and apart, got one at 2 where the one before ends at 3"),
        ({"embeddings": spans(-1)}, "in order and apart, got one at -1"),
    ],
)
def test_other_things_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        Inputs(**given)
