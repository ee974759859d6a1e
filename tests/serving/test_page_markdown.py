"""The live page's Markdown in a headless browser: what becomes of it, and that no text of a model is ever HTML."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import FOUND, Seen, look

from paceline.explain import PAGES
from paceline.registry import DRAFTERS
from paceline.serving.page import FILES

browser = pytest.mark.skipif(FOUND is None, reason="no chromium or google-chrome on this machine")

HOSTILE = [
    "<script>window.broken = true</script>",
    "<img src=x onerror='window.broken = true'>",
    "<svg onload='window.broken = true'></svg>",
    "**<img src=x onerror='window.broken = true'>**",
    "- <img src=x onerror='window.broken = true'>\n  > "
    "<iframe srcdoc='<script>parent.broken = true</script>'></iframe>",
    "```html\n<img src=x onerror='window.broken = true'>\n</code></pre><script>window.broken = true</script>\n```",
    "```\"><img src=x onerror='window.broken=true'>\ncode\n```",
    "| <img src=x onerror='window.broken = true'> | b |\n|---|---|\n"
    "| `<b onclick=alert(1)>` | <style>* { display: none }</style> |",
    "[click](javascript:window.broken=true) [click](JaVaScRiPt:alert(1)) [x](data:text/html,<script>alert(1)</script>)",
    "[a](vbscript:x) [b](\x01javascript:alert(1)) [c](java\tscript:alert(1)) "
    "[d](//evil.example) [e](/v1/models) [f](file:///etc/passwd)",
    '[title](https://example.org "x\' onmouseover=window.broken=true") ![image](https://example.org/x.png)',
    "<https://example.org/\"onmouseover='window.broken=true'> https://example.org/'onload=1 "
    "<a href='javascript:alert(1)'>x</a>",
    "# <base href='https://evil.example/'><meta http-equiv=refresh content='0;url=https://evil.example'>",
    "&lt;script&gt;window.broken = true&lt;/script&gt; &#60;img src=x onerror=alert(1)&#62;",
]
UNSAFE = """const unsafe = (text) => text.replace(/\\*\\*(.+?)\\*\\*/g, "<b>$1</b>")
    .replace(/\\[([^\\]]*)\\]\\(([^)]*)\\)/g, '<a href="$2">$1</a>');"""
"""A renderer as many are: what is no Markdown goes through as HTML."""


def drawn(folder: Path, texts: list[str], render: str, report: str) -> Seen:
    """Draw texts in a page without any policy.

    Args:
        render: the body of a function of `text` and an element, `box`.
        report: an expression over all boxes, `boxes`.
    """
    scripts = [(PAGES / "tree.js").read_text(), (FILES / "markdown.js").read_text(), UNSAFE]
    data = json.dumps(texts).replace("<", "\\u003c")
    draw = f"""const boxes = {data}.map((text) => {{
        const box = document.body.appendChild(document.createElement("div"));
        const write = (from, to) => [text.slice(from, to)];
        {render}
        return box;
    }});
    function report() {{ return {report}; }}"""
    parts = "".join(f"<script>{text}</script>" for text in scripts)
    return look(f"<!doctype html><html><head></head><body>{parts}</body></html>", folder, draw)


def made(folder: Path, *texts: str) -> list[str]:
    """The elements of some texts, without what belongs to the copy buttons."""
    render = """box.append(...markdownBlocks(text, write).map((one) => one.node));
        for (const head of box.querySelectorAll(".code-head")) head.remove();"""
    seen = drawn(folder, list(texts), render, "boxes.map((box) => box.innerHTML)")
    assert seen.faults == []
    return [re.sub(r' (class|tabindex|title|target|rel)="[^"]*"', "", one) for one in seen.told]


REPORT = """({
    tags: boxes.flatMap((box) => [...box.querySelectorAll("*")].map((one) => one.localName)),
    attributes: boxes.flatMap((box) => [...box.querySelectorAll("*")].flatMap((one) => one.getAttributeNames())),
    links: boxes.flatMap((box) => [...box.querySelectorAll("a")].map((one) => one.protocol)),
    texts: boxes.map((box) => box.textContent),
})"""


@browser
def test_no_text_of_a_model_becomes_html(tmp_path: Path) -> None:
    seen = drawn(tmp_path, HOSTILE, "box.append(...markdownBlocks(text, write).map((one) => one.node));", REPORT)
    assert (seen.faults, seen.broken, seen.loaded) == ([], False, [])
    tags = {"p", "strong", "ul", "li", "blockquote", "div", "span", "button", "pre", "code", "h3", "a"}
    tags |= {"table", "thead", "tbody", "tr", "th", "td"}
    assert set(seen.told["tags"]) <= tags
    assert set(seen.told["attributes"]) <= {"class", "type", "tabindex", "href", "title", "target", "rel"}
    assert set(seen.told["links"]) == {"https:"}
    assert "<script>window.broken = true</script>" in seen.told["texts"][0]
    assert "&lt;script&gt;" in seen.told["texts"][-1]


@browser
def test_an_unsafe_renderer_runs_what_these_texts_hold(tmp_path: Path) -> None:
    """The control: the browser would run it, and the report would tell."""
    seen = drawn(tmp_path, HOSTILE[:10], "box.innerHTML = unsafe(text);", REPORT)
    assert seen.broken
    assert {"img", "svg"} <= set(seen.told["tags"])
    assert "javascript:" in seen.told["links"]


@browser
def test_markdown_becomes_elements(tmp_path: Path) -> None:
    expected = {
        "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
        "## A *b* ##\ntext": "<h4>A <em>b</em></h4><p>text</p>",
        "**bold**, *it*, ***both***, ~~gone~~, `a*b*`": (
            "<p><strong>bold</strong>, <em>it</em>, "
            "<strong><em>both</em></strong>, <del>gone</del>, <code>a*b*</code></p>"
        ),
        "**a *b* c** and *d* **e *f***": (
            "<p><strong>a <em>b</em> c</strong> and <em>d</em> <strong>e <em>f</em></strong></p>"
        ),
        "snake_case_name, 2 * 3 * 4, **open, \\*no\\*, ``a ` b``": (
            "<p>snake_case_name, 2 * 3 * 4, **open, *no*, <code>a ` b</code></p>"
        ),
        "- a\n- b\n  - c\n\n  more\n\n1. x\n2. y\n   - z": (
            "<ul><li>a</li><li>b<ul><li>c</li></ul><p>more</p></li></ul>"
            '<ol start="1"><li>x</li><li>y<ul><li>z</li></ul></li></ol>'
        ),
        "It was\n1984. Then": "<p>It was\n1984. Then</p>",
        "> quoted\n> - item\n\nafter": "<blockquote><p>quoted</p><ul><li>item</li></ul></blockquote><p>after</p>",
        "```python\ndef f():\n    return 1\n\n# no heading\n```\nafter": (
            "<div><pre><code>def f():\n    return 1\n\n# no heading</code></pre></div><p>after</p>"
        ),
        "~~~\nopen": "<div><pre><code>open</code></pre></div>",
        "| a | b |\n|---|:-:|\n| 1 | `x` \\| y |\n\nafter": (
            "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>"
            "<tr><td>1</td><td><code>x</code> | y</td></tr>"
            "</tbody></table></div><p>after</p>"
        ),
        "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
        "[t **b**](https://example.org/a_b) https://example.org/c.": (
            '<p><a href="https://example.org/a_b">t **b**</a> <a href="https://example.org/c">https://example.org/c</a>.</p>'
        ),
        "![alt](https://example.org/i.png)": '<p><a href="https://example.org/i.png">alt</a></p>',
    }
    found = made(tmp_path, *expected)
    assert dict(zip(expected, found, strict=True)) == expected


@browser
def test_long_and_deep_texts_take_little_time(tmp_path: Path) -> None:
    texts = [
        "> " * 2000 + "a",
        "- " * 2000,
        "*a " * 4000,
        "**a _b " * 2000,
        "[" * 8000,
        "[](a" * 3000,
        "`" * 3000 + "a`b" * 2000,
        "|" * 6000 + "\n" + "|-" * 3000,
    ]
    render = (
        "const began = performance.now(); markdownBlocks(text, write); box.dataset.took = performance.now() - began;"
    )
    took = drawn(tmp_path, texts, render, "boxes.map((box) => Number(box.dataset.took))").told
    assert max(took) < 1000, took


def test_every_drafter_has_words_for_where_its_drafts_come_from() -> None:
    script = (FILES / "page.js").read_text()
    sources = script[script.index("const SOURCES") :]
    named = set(re.findall(r'([a-z_+0-9]+)"?: ', sources[: sources.index("};")]))
    assert set(DRAFTERS) <= named
    assert "no_such_drafter" not in named
