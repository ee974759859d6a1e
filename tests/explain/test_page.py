"""The page: its data survives any text, it needs nothing from outside, and a browser draws every step of it.

Pictures are kept as PACELINE_ARTIFACTS says (see `browser`).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import FOUND, look, picture
from explain.replays import NASTY, explained, node, step, wide
from explain.replays import replay as made

from paceline import LLM, ConfigError, SamplingParams
from paceline.engine import watching
from paceline.explain import EXPLAIN_MARK, PAGES, Recorder, Replay, embedded, warm_up

browser = pytest.mark.skipif(FOUND is None, reason="no chromium or google-chrome on this machine")


class Scripts(HTMLParser):
    """The script elements of a page, as a parser of HTML sees them, and every attribute that could load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.links: list[str] = []
        self._open: dict[str, str | None] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = dict(attrs) if tag == "script" else None
        self.links += [
            f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data", "action", "poster")
        ]

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.scripts.append((self._open, data))
            self._open = None


def nasty() -> dict[str, Any]:
    return made(
        [step(wide(3, 2)), step(), step([node(0, -1, 1, "cut", missed=True)], words="\n".join(NASTY))],
        drafters=("a", NASTY[0]),
    )


def two(data: dict[str, Any]) -> dict[str, Any]:
    """The same with a second drafter in every step."""
    for one in data["steps"]:
        one["drafters"].append(None)
    return data


def test_embedded_data_is_plain_ascii_and_comes_back() -> None:
    text = embedded(NASTY)
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == NASTY
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded([float("nan")])


def test_a_parser_finds_the_data_whole() -> None:
    page = Replay(two(nasty())).to_html()
    kinds = [attributes.get("type") for attributes, _ in Scripts(page).scripts]
    assert kinds == ["application/json", None]
    assert json.loads(Scripts(page).scripts[0][1]) == json.loads(json.dumps(Replay(two(nasty())).to_dict()))
    naive = page.replace(embedded(Replay(two(nasty())).to_dict()), json.dumps(nasty()))
    assert len(Scripts(naive).scripts) > 2


def test_nothing_in_the_page_points_outside() -> None:
    page = Replay(two(nasty())).to_html()
    assert Scripts(page).links == []
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|innerHTML|eval\(", page)
    assert "default-src 'none'" in page
    assert EXPLAIN_MARK in page[:1000]
    assert page.isascii() or set(page) - {chr(i) for i in range(128)} <= set("\u2190\u2192")


def test_a_replay_has_the_text_and_a_page() -> None:
    found = explained(LLM(dtype="float32"), "One day", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert found.text == found.to_dict()["output"]["text"]
    assert found.sentences == [*found.data["summary"]["found"], *found.data["summary"]["advice"]]
    assert found.to_html().startswith("<!doctype html>")


def test_what_the_warm_up_decodes_is_learned_by_nobody() -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm = LLM(dtype="float32", speculative_config={"method": "suffix", "num_speculative_tokens": 4})

    def trees(found: dict[str, Any]) -> list[Any]:
        return [[(node["token"], node["status"]) for node in one["nodes"]] for one in found["steps"]]

    recorder = Recorder(llm.with_speculative_config(llm.speculative))
    for _ in recorder.run("One day", params):
        pass
    cold = trees(recorder.data())
    calls = []
    with watching(llm.engine, calls.append):
        warm_up(llm, "One day", params)
    assert not calls
    assert trees(explained(llm, "One day", params).data) == cold
    assert trees(explained(llm, "One day", params).data) != cold  # the recorded run itself was learned from
    with pytest.raises(ConfigError, match="n must be 1"):
        warm_up(llm, "One day", replace(params, n=2, temperature=1.0))


WALK = """
const report = () => {
  const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const seen = [];
  document.querySelector("details").open = true;
  for (let i = 0; i < steps.length; i++) {
    seen.push({
      labels: [...document.querySelectorAll("#tree g.node text:first-of-type")].map((text) => text.textContent),
      statuses: [...document.querySelectorAll("#tree g.node")].map((g) => g.getAttribute("class").split(" ")[1]),
      boxes: [...document.querySelectorAll("#tree rect.box")].map(
        (box) => ["x", "y", "width", "height"].map((name) => Number(box.getAttribute(name)))),
      rows: document.querySelectorAll("#nodes tbody tr").length,
      words: document.querySelectorAll("#words li").length,
      text: [...document.querySelectorAll("#text span:not(.later)")].map((span) => span.textContent).join(""),
      slider: document.getElementById("slider").value,
    });
    press("ArrowRight");
  }
  press("Home");
  const home = document.getElementById("slider").value;
  press("End");
  const end = document.getElementById("slider").value;
  press("Home");
  press(" ");
  const playing = document.getElementById("play").getAttribute("aria-label");
  press(" ");
  const node = document.querySelectorAll("#tree g.node")[1];
  if (node) node.dispatchEvent(new PointerEvent("pointerenter"));
  const detail = document.getElementById("detail").textContent;
  return { seen, home, end, playing, detail, fits: document.documentElement.scrollWidth <= window.innerWidth };
};
"""


def drawn(page: str, folder: Path, address: str = "") -> dict[str, Any]:
    """Step through a page by its keys; no complaint, no request, no text that ran."""
    seen = look(page, folder, WALK, address)
    assert (seen.faults, seen.loaded, seen.console, seen.broken) == ([], [], [], False)
    told: dict[str, Any] = seen.told
    return told


def overlap(a: list[float], b: list[float]) -> bool:
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]


@browser
def test_any_text_is_shown_as_text(tmp_path: Path) -> None:
    data = two(nasty())
    told = drawn(Replay(data).to_html(), tmp_path)
    assert [one["slider"] for one in told["seen"]] == ["0", "1", "2"]
    assert (told["home"], told["end"]) == ("0", "2")
    labels = told["seen"][0]["labels"]
    assert any(label.startswith("</script><scrip") for label in labels)
    assert any(label.startswith("{{ 7 * 7 }}") for label in labels)
    assert told["seen"][2]["words"] == len("\n".join(NASTY).split("\n"))
    assert "</script><script>window.broken = true</script>" in told["seen"][2]["text"]


@browser
def test_trees_of_every_shape_are_laid_out_apart_and_fit_the_window(tmp_path: Path) -> None:
    shapes = [wide(1, 16), wide(4, 9), wide(31, 1), wide(3, 12), *([] for _ in range(220))]
    told = drawn(
        Replay(two(made([step(nodes) for nodes in shapes], drafters=("a", "b")))).to_html(), tmp_path, "?theme=dark"
    )
    assert len(told["seen"]) == len(shapes)
    for nodes, seen in zip(shapes, told["seen"], strict=True):
        boxes = seen["boxes"]
        assert len(boxes) == len(nodes) + 2  # the root, the target's own token
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if overlap(a, b)]
        assert seen["rows"] in (
            len(nodes),
            0 if seen["slider"] == "0" else len(nodes),
        )  # the table opens after the first step
        assert sorted(seen["statuses"]) == sorted(["root", "own", *(one["status"] for one in nodes)])
    assert told["fits"]
    assert told["playing"] == "Pause"
    assert "chance .25 by the target, .50 by the drafter; token 0, level 1." in told["detail"]


@browser
def test_a_real_run_is_drawn_and_kept_as_pictures(tmp_path: Path) -> None:
    llm = LLM(dtype="float32")
    found = explained(
        llm, "One day, a little girl named Lily", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    )
    page = found.to_html()
    told = drawn(page, tmp_path)
    assert len(told["seen"]) == len(found.data["steps"])
    assert told["seen"][-1]["text"] == found.data["prompt"]["text"] + found.text
    for one, recorded in zip(told["seen"], found.data["steps"], strict=True):
        assert len(one["boxes"]) == len(recorded["nodes"]) + 2
        assert one["words"] == len(recorded["words"].split("\n"))
    for name, address, size in [
        ("explain-light", "?theme=light#3", (1280, 1700)),
        ("explain-dark", "?theme=dark#3", (1280, 1700)),
        ("explain-narrow", "?theme=light#3", (400, 1900)),
    ]:
        assert picture(page, tmp_path, name, address, size).stat().st_size > 20_000


@browser
def test_the_browser_check_sees_requests_errors_and_broken_data(tmp_path: Path) -> None:
    page = Replay(made([step()])).to_html()
    outside = page.replace("<main>", '<main><img src="https://paceline.invalid/x.png">')
    faults = look(outside, tmp_path, "undefined_name()").faults
    assert any("blocked" in fault for fault in faults)
    assert any("undefined_name" in fault for fault in faults)
    data = Replay(made([step()], texts=NASTY[:1])).to_dict() | {"prompt": {"text": "", "tokens": 1}}
    naive = Replay(data).to_html().replace(embedded(data), json.dumps(data))
    assert look(naive, tmp_path).broken


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def mixed(a: str, b: str, share: float) -> str:
    both = [(int(a[i : i + 2], 16), int(b[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(share * x + (1 - share) * y):02x}" for x, y in both)


def test_colours_keep_the_contrast_that_text_needs() -> None:
    """4.5 for text, 3 for what only marks (WCAG 2.1, 1.4.3 and 1.4.11), in both themes, on tinted boxes too."""
    css = (PAGES / "explain.css").read_text(encoding="utf-8")
    themes = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root[^{]*{([^}]*)}", css)]
    tints = [int(found) / 100 for found in re.findall(r"--tint: (\d+)%", css)]
    assert len(themes) == len(tints) == 2
    for theme, tint in zip(themes, tints, strict=True):
        drafters = [theme[f"d{i}"] for i in range(8)]
        for colour in (theme["ink"], theme["muted"], theme["refused"], *drafters):
            assert contrast(colour, theme["surface"]) >= 4.5, colour
        assert contrast(theme["muted"], theme["page"]) >= 4.5
        assert contrast(theme["on-target"], theme["target"]) >= 4.5
        assert contrast(theme["line-strong"], theme["surface"]) >= 3
        for colour in drafters:
            box = mixed(colour, theme["surface"], tint)
            assert contrast(colour, box) >= 4.5, colour
            assert contrast(theme["ink"], mixed(colour, theme["surface"], 2.2 * tint)) >= 4.5, colour
        assert all(a != b for a, b in pairwise(drafters))
    assert contrast("#777777", "#888888") < 3
