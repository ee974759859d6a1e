"""Codebooks, and how they stand in a model.

Axes in this module: n = tokens, d = width of a state, c = codes of a book, k = codes that fire.

Source: Codebook Features: Sparse and Discrete Interpretability for Neural Networks (arXiv:2310.17230).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import CapabilityError, CheckpointError
from paceline.utils import choice, integer, need

SITES: Final = ("attention", "mlp")
"""Modules of a layer behind which a codebook may stand."""

MODULES: Final = {"attention": "self_attn", "mlp": "mlp"}

FASTER: Final = 300.0
"""The codes' learning rate over the model's, in units of their root mean square."""

CONFIG, TENSORS = "codebooks.json", "codebooks.safetensors"
"""Files in a model's folder."""


class Codebook(nn.Module):
    """Replaces a state by the mean of the k codes nearest to it by Euclidean distance.

    Backwards, the state has the gradient of its replacement (straight through), and so have the codes.

    Args:
        size: codes. width: of a state. firing: how many codes make a state.
    Attributes:
        units: (c, d) codes over `scale`, which is () FASTER times their root mean square: Adam moves all weights alike,
            but codes of some layers are a thousand times those of others, and must move faster than the model's.
        fired: (c,) how often each has fired while `train` was on, since `revive`.
        forced: ids that fire in place of the last ones that would, wherever `read` runs.
        clustering: rounds and generator, where it is to `cluster` what it reads next.
        ids, states: (n, k) what fired, and (n, d) on what, when it last ran.
    """

    def __init__(self, size: int, width: int, firing: int) -> None:
        super().__init__()
        integer("firing", firing, 1, size)
        self.units = nn.Parameter(torch.empty(size, width))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.take(torch.randn(size, width))
        self.fired = nn.Parameter(torch.zeros(size), requires_grad=False)  # a parameter: kept with a stopped run
        self.firing = firing
        self.forced: Sequence[int] = ()
        self.clustering: tuple[int, torch.Generator] | None = None
        self.ids = self.states = torch.empty(0)

    @property
    def codes(self) -> Tensor:
        """(c, d)."""
        return self.units * self.scale

    @torch.no_grad()
    def take(self, codes: Tensor) -> None:
        """Hold these codes (c, d)."""
        self.scale.copy_(codes.square().mean().sqrt().clamp(min=1e-8) * FASTER)
        self.units.copy_(codes / self.scale)

    def nearest(self, states_nd: Tensor) -> Tensor:
        """(n, k) ids of the nearest codes, the nearest first."""
        with torch.no_grad(), torch.autocast(states_nd.device.type, enabled=False):
            return _nearest(states_nd.float(), self.codes, self.firing)

    def forward(self, states: Tensor) -> Tensor:
        """(..., d) replacements of states (..., d)."""
        states_nd = states.flatten(0, -2)
        if self.clustering is not None:
            self.cluster(states_nd.float(), *self.clustering)
        self.ids = self.nearest(states_nd)
        if len(self.forced):
            kept = self.firing - len(self.forced)
            self.ids = torch.cat([self.ids.new_tensor(self.forced).expand(len(self.ids), -1), self.ids[:, :kept]], 1)
        made = self._made().view_as(states).to(states.dtype)
        if self.training:
            self.states = states_nd
            self.fired.add_(torch.bincount(self.ids.flatten(), minlength=len(self.units)))
        return made + (states - states.detach())

    def distance(self) -> Tensor:
        """The mean squared distance of the states that it last replaced from their replacements, over the codes' mean
        square. It moves codes and states towards each other: without it, states grow where nothing shows it.
        """
        return F.mse_loss(self._made(), self.states.float()) / (self.scale / FASTER).square()

    def _made(self) -> Tensor:
        """(n, d) means of the codes that fired."""
        return F.embedding(self.ids, self.units).mean(1) * self.scale

    @torch.no_grad()
    def revive(self, generator: torch.Generator) -> int:
        """Make codes that have not fired since the last time states that it last replaced; how many there were."""
        dead = (self.fired == 0).nonzero().squeeze(1)
        chosen = torch.randint(len(self.states), (len(dead),), generator=generator)
        self.units[dead] = self.states[chosen.to(self.states.device)].to(self.units.dtype) / self.scale
        self.fired.zero_()
        return len(dead)

    @torch.no_grad()
    def cluster(self, states: Tensor, rounds: int, generator: torch.Generator) -> None:
        """Begin with the means of clusters of states (n, d), which k-means finds in so many rounds."""
        codes = states[torch.randint(len(states), (len(self.units),), generator=generator)].clone()
        for _ in range(rounds):
            own = _nearest(states, codes, 1)[:, 0]
            count = torch.bincount(own, minlength=len(codes))
            total = torch.zeros_like(codes).index_add_(0, own, states)
            codes[count > 0] = total[count > 0] / count[count > 0, None]
        self.take(codes)


def _nearest(states_nd: Tensor, codes_cd: Tensor, count: int) -> Tensor:
    """(n, count) ids of the nearest codes, the nearest first."""
    near_nc = (
        states_nd @ codes_cd.T - codes_cd.square().sum(-1) / 2
    )  # minus half the squared distance, less states_nd's
    return near_nc.topk(count).indices


class Books(nn.Module):
    """The codebooks of a model, which stand in it from now on.

    Args:
        layers: of a decoder of transformers. width: of its states. size, firing: as for `Codebook`.
        sites: of SITES.
    Attributes:
        names: of the books, as "3.mlp" for layer 3; in order.
        on: they replace anything at all.
    Raises:
        ConfigError: a site that there is not, or more codes firing than there are.
        CapabilityError: layers without these modules.
    """

    def __init__(self, layers: nn.ModuleList, width: int, *, size: int, firing: int, sites: Sequence[str]) -> None:
        super().__init__()
        need(len(sites) > 0, "sites", f"be one or more of {', '.join(SITES)}", sites)
        for site in sites:
            choice("sites", site, SITES)
        self.size, self.sites, self.firing, self.on = size, tuple(sites), firing, True
        self.names = tuple(f"{layer}.{site}" for layer in range(len(layers)) for site in sites)
        self.books = nn.ModuleList([Codebook(size, width, firing) for _ in self.names])
        for name, book in self.items():
            layer, site = name.split(".")
            module = getattr(layers[int(layer)], MODULES[site], None)
            if not isinstance(module, nn.Module):
                raise CapabilityError(f"codebooks need layers with {MODULES[site]}, got {type(layers[0]).__name__}")
            module.register_forward_hook(self._replaced(book))

    def items(self) -> Iterator[tuple[str, Codebook]]:
        """Names and books."""
        for name, book in zip(self.names, self.books, strict=True):
            assert isinstance(book, Codebook)
            yield name, book

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model without them."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    @contextmanager
    def forcing(self, codes: Mapping[str, Sequence[int]]) -> Iterator[None]:
        """Codes fire wherever the model runs, in place of the farthest that would.

        Args:
            codes: name of a book -> ids.
        Raises:
            ConfigError: no such book, no such code, or more than fire.
        """
        books = dict(self.items())
        for name, ids in codes.items():
            choice("force", name, self.names)
            need(0 < len(ids) <= self.firing, "force", f"name 1 to {self.firing} codes of a book", list(ids))
            for one in ids:
                integer("force", one, 0, self.size - 1)
        try:
            for name, ids in codes.items():
                books[name].forced = tuple(ids)
            yield
        finally:
            for name in codes:
                books[name].forced = ()

    @contextmanager
    def clustering(self, rounds: int, generator: torch.Generator) -> Iterator[None]:
        """Codes become means of clusters of the states of a pass, each book's behind those before it."""
        try:
            for _, book in self.items():
                book.clustering = rounds, generator
            yield
        finally:
            for _, book in self.items():
                book.clustering = None

    def _replaced(self, book: Codebook) -> Any:
        def hook(module: nn.Module, given: Any, made: Any) -> Any:
            if not self.on:
                return None
            return (book(made[0]), *made[1:]) if isinstance(made, tuple) else book(made)

        return hook


def write_books(folder: Path, books: Books) -> None:
    """Beside the model that was trained with them."""
    facts = {"size": books.size, "firing": books.firing, "sites": list(books.sites)}
    (folder / CONFIG).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    save_file({name: book.codes.detach().float().cpu().contiguous() for name, book in books.items()}, folder / TENSORS)
    shutil.copymode(folder / CONFIG, folder / TENSORS)  # safetensors lets the owner alone read it


def read_books(folder: Path, layers: nn.ModuleList, width: int) -> Books:
    """What `write_books` wrote, put into a model.

    Raises:
        CheckpointError: no codebooks there, damaged ones, or those of another model.
    """
    if not (folder / CONFIG).is_file() or not (folder / TENSORS).is_file():
        raise CheckpointError(f"no codebooks in {folder}; `paceline train codebooks` makes some")
    try:
        facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        size, firing, sites = facts["size"], facts["firing"], facts["sites"]
        integer("size", size, 1, 1 << 20)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG} is damaged ({error!r}); make the codebooks again") from None
    books = Books(layers, width, size=size, firing=firing, sites=sites)
    tensors = load_file(folder / TENSORS)
    if {name: tuple(one.shape) for name, one in tensors.items()} != dict.fromkeys(books.names, (size, width)):
        raise CheckpointError(f"{folder / TENSORS} holds codebooks of another model; make them again")
    with torch.no_grad():
        for name, book in books.items():
            book.take(tensors[name])
    return books
