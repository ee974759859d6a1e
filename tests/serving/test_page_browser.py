"""The live page in a real Chromium, moved by Playwright."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving.conftest import Live, serve

from paceline import LLM, AsyncLLM

CHROMIUM = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
if CHROMIUM is None:
    pytest.skip("no chromium here", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here; pip install playwright")

EVIL = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'> one two one two one two one two"
WATCH = """
window.faults = [];
addEventListener("error", (event) => faults.push(String(event.message)));
addEventListener("unhandledrejection", (event) => faults.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => faults.push("blocked " + event.blockedURI + event.sourceFile));
"""


@pytest.fixture(scope="module")
def keyed(llm: LLM) -> Iterator[Live]:
    model = AsyncLLM(llm.with_speculative_config({"method": "ngram", "num_speculative_tokens": 4}))
    yield from serve(model, api_key=["mine"], admin_key=["boss"], max_request_tokens=60)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def tab(browser: Any, keyed: Live) -> Iterator[Any]:
    """The page before a key was given; at its end nothing may have failed, or have been asked of anybody else."""
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.add_init_script(WATCH)
    page.goto(keyed.url)
    page.wait_for_selector("#door:not([hidden])")
    yield page
    assert page.evaluate("faults") == []
    assert page.evaluate("window.broken") is None
    assert all(url.startswith((keyed.url, "data:")) for url in asked)
    page.close()


def enter(tab: Any, key: str = "mine") -> None:
    tab.fill("#key", key)
    tab.press("#key", "Enter")
    tab.wait_for_selector("#live:not([hidden])")


def ask(tab: Any, text: str) -> None:
    tab.fill("#question", text)
    tab.press("#question", "Enter")
    tab.wait_for_selector("#send:not([disabled])", timeout=60_000)


def test_the_key_is_asked_for_and_stays_in_the_tab(tab: Any, keyed: Live) -> None:
    tab.fill("#key", "wrong")
    tab.press("#key", "Enter")
    tab.wait_for_function("() => document.getElementById('trouble').textContent.includes('does not know this key')")
    assert tab.is_hidden("#live")
    enter(tab)
    assert tab.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    assert "mine" not in tab.url
    tab.click("#forget")
    tab.wait_for_selector("#door:not([hidden])")
    assert tab.evaluate("sessionStorage.length") == 0


def test_a_chat_is_coloured_by_drafter_and_no_text_is_markup(tab: Any, keyed: Live) -> None:
    enter(tab)
    ask(tab, EVIL)
    log = tab.inner_text("#log")
    assert "<script>window.broken = 1</script><img" in log
    assert tab.query_selector("#log img, #log script") is None
    tokens, drafted = map(int, re.findall(r"(\d+) tokens?, (\d+) of them drafted", log)[0])
    assert 0 < tokens <= 60
    assert (len(tab.query_selector_all("#log .drafted")) > 0) is (drafted > 0)
    tab.wait_for_selector("#tree svg")
    tab.wait_for_selector("#words li")
    assert tab.inner_text("#outcome")
    assert "ngram" in tab.inner_text("#drafters")
    assert tab.get_attribute("#speed svg", "aria-label").startswith("tokens per second")
    ask(tab, "and again")
    assert tab.inner_text("#log").count("You") == 2
    tab.click("#clear")
    assert tab.inner_text("#log") == ""


def test_the_administrator_sees_no_text_of_others(tab: Any, browser: Any, keyed: Live) -> None:
    other = browser.new_page()
    other.goto(keyed.url)
    enter(other, "boss")
    other.wait_for_timeout(200)
    enter(tab)
    ask(tab, EVIL)
    other.wait_for_selector("#tree svg")
    assert "requests of all keys" in other.inner_text("#setup")
    other.wait_for_function("() => document.getElementById('detail').textContent.includes('hidden')")
    assert set(other.inner_text("#tree")) <= set("\N{BULLET}0123456789. \n\u2013")
    other.close()


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_narrow_and_wide_screens_in_both_themes(
    tab: Any, keyed: Live, width: int, theme: str, tmp_path: Path
) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=theme)
    enter(tab)
    ask(tab, "one two three one two three one two three")
    tab.wait_for_selector("#tree svg")
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    cut = """[...document.querySelectorAll("button, h2, dd, label")].filter((one) => one.offsetParent &&
        (one.scrollWidth > one.clientWidth + 1 || one.getBoundingClientRect().right > innerWidth))
        .map((one) => one.textContent)"""
    assert tab.evaluate(cut) == []
    folder = Path(os.environ.get("PACELINE_ARTIFACTS", tmp_path))
    tab.screenshot(path=folder / f"live-{width}-{theme}.png", full_page=True)


def test_everything_has_a_name_and_is_reached_by_keyboard(tab: Any, keyed: Live) -> None:
    enter(tab)
    nameless = """[...document.querySelectorAll("input, textarea, select, button, [tabindex], [role=img]")]
        .filter((one) => !(one.labels && one.labels.length))
        .filter((one) => !one.textContent.trim() && !one.getAttribute("aria-label"))
        .map((one) => one.id)"""
    assert tab.evaluate(nameless) == []
    tab.focus("#theme")
    reached = []
    for _ in range(12):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or reached[-1] == "BODY"
    assert [one for one in reached if one != "BODY"][:7] == [
        "log", "question", "send", "clear", "temperature", "request", "tree",
    ]  # fmt: skip
    assert tab.evaluate("document.querySelectorAll('[aria-live=assertive]').length") == 0


def test_the_focus_stays_in_the_chat_and_enter_checks_as_the_button_does(tab: Any, keyed: Live) -> None:
    focused = "document.activeElement.id"
    enter(tab)
    tab.wait_for_function(f"() => {focused} === 'question'")
    tab.fill("#temperature", "-3")
    tab.focus("#question")
    tab.keyboard.type("Tell a story")
    tab.keyboard.press("Enter")
    assert tab.evaluate(focused) == "temperature"  # the browser says there what is wrong
    assert tab.inner_text("#log") == ""
    tab.fill("#temperature", "0")
    tab.evaluate("busy(true)")
    tab.focus("#stop")
    tab.evaluate("busy(false, 'Stopped.')")
    assert tab.evaluate(focused) == "question"


def test_a_long_conversation_begins_with_a_question(tab: Any, keyed: Live) -> None:
    """Templates that want both sides in turn rejected all that came after the first forty messages."""
    enter(tab)
    roles = """() => {
        for (let i = 0; i < 50; i++) { asked("q"); conversation.push({ role: "assistant", content: "a" }); }
        return asked("q")[1].messages.map((one) => one.role);
    }"""
    found = tab.evaluate(roles)
    assert len(found) < 41
    assert found == ["user", "assistant"] * (len(found) // 2) + ["user"]


def test_it_asks_nothing_while_nobody_sees_it(tab: Any, keyed: Live) -> None:
    enter(tab)
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true})"
    tab.evaluate(hide % "true")
    tab.wait_for_timeout(1500)
    before = tab.evaluate("document.documentElement.dataset.ready")
    tab.wait_for_timeout(2500)
    assert tab.evaluate("document.documentElement.dataset.ready") == before
    tab.evaluate(hide % "false")
    tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    tab.wait_for_function(f"() => document.documentElement.dataset.ready > {before}")


def test_what_it_keeps_has_a_bound(tab: Any, keyed: Live) -> None:
    """As many pieces as in ten minutes."""
    enter(tab)
    ask(tab, "one two one two one two one two")
    tab.wait_for_selector("#tree svg")
    flood = """(rounds) => {
        const answer = window.flooded ||= new Answer(document.getElementById("log"));
        for (let i = 0; i < rounds; i++) {
            const found = structuredClone(state);
            found.counts.steps += 10; found.counts.tokens += 20; found.counts.seconds += 1;
            if (found.tree) found.tree.tokens += 1;
            for (const one of Object.values(found.counts.drafters)) {
                one.verified += 9; one.accepted += 4; one.tried[0] += 9; one.reached[0] += 4;
            }
            take(found);
            for (let j = 0; j < 40; j++) answer.waiting.push({ text: "some word ", drafter: j % 2 ? "ngram" : null });
            answer.draw();
        }
        return [document.querySelectorAll("*").length, document.getElementById("log").textContent.length];
    }"""
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable")

    def heap() -> float:
        session.send("HeapProfiler.collectGarbage")
        found = session.send("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in found if one["name"] == "JSHeapUsedSize")

    tab.evaluate(flood, 200)
    first = heap()
    elements, characters = tab.evaluate(flood, 600)
    assert elements < 2500
    assert tab.evaluate("document.getElementById('log').clientHeight") < 700
    assert characters < 115_000
    assert heap() < first + 1e6
