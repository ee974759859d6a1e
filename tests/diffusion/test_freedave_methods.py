"""FreeDave under every method of the catalogue: reproduced, or refused for its memory."""

import pytest

from paceline.diffusion import METHODS, Canvas, ConfiguredMethod
from paceline.errors import ConfigError
from tests.diffusion.decoding import fill, same
from tests.diffusion.toys_t4 import t4

SINGLE = [name for name, method in METHODS.items() if method.verification == "none"]


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("name", SINGLE)
def test_every_method_without_memory_is_reproduced(name: str, cache: str) -> None:
    toy = t4(eos_token_ids=(22,))
    try:
        plain = fill(toy, {"method": name, "cache": cache}, 8)
    except ConfigError as error:
        pytest.skip(f"needs more than a model: {error}")
    config = {"method": name, "cache": cache, "verification": "freedave"}
    parts = ConfiguredMethod({**config, "verification": "none"}).parts(toy, Canvas.of((3, 4, 5), 8, mask_token_id=23))
    if not parts.transition.stateless:
        with pytest.raises(ConfigError, match="has a memory"):
            fill(toy, config, 8)
        return
    ours = fill(toy, config, 8)
    assert same(plain, ours)
    assert ours.trajectory.calls <= plain.trajectory.calls
