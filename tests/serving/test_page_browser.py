"""The live page in a real Chromium, moved by Playwright."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving.conftest import Live, Scripted, serve

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


def answer(tab: Any, text: str, chunk: int = 7) -> None:
    """Show an answer as if the model wrote it, some characters at a time, every second piece drafted."""
    pieces = [text[start : start + chunk] for start in range(0, len(text), chunk)]
    show = """(pieces) => {
        const shown = new Answer(document.getElementById("log"));
        pieces.forEach((text, i) => { shown.push(text, i % 2 ? "ngram" : null); shown.draw(); });
        shown.end("", false, pieces.join(""));
    }"""
    tab.evaluate(show, pieces)


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
    tab.wait_for_selector("#plan li")
    assert re.search(r"ngram draft(s|ed) \d+ tokens? ahead from repeated text", tab.inner_text("#plan"))
    tab.click("#own-words summary")
    tab.wait_for_selector("#words li")
    assert tab.inner_text("#outcome")
    assert "ngram" in tab.inner_text("#drafters")
    assert tab.get_attribute("#speed svg", "aria-label").startswith("tokens per second")
    ask(tab, "and again")
    assert tab.inner_text("#log").count("You") == 2
    tab.click("#clear")
    assert tab.inner_text("#log") == ""


def test_an_answer_is_the_same_however_it_streams(tab: Any, keyed: Live) -> None:
    """Each piece is drawn anew from where the last block begins; the whole at once is the control."""
    enter(tab)
    text = """# Title\n\nFirst *one*\nand **two**.\n\n1. a\n\n2. b\n   - c\n
```py\nx = 1\n\ny = 2\n```\n> q\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nEnd."""
    shown = """() => {
        const last = [...document.querySelectorAll("#log .answer")].pop().cloneNode(true);
        for (const one of last.querySelectorAll(".drafted")) one.replaceWith(...one.childNodes);
        last.normalize();
        return last.innerHTML;
    }"""
    found = []
    for chunk in (1, 2, 7, 1000):
        answer(tab, text, chunk)
        found.append(tab.evaluate(shown))
    assert "<h3>Title</h3>" in found[-1]
    assert '<ol start="1"><li>a</li><li>b<ul><li>c</li></ul></li></ol>' in found[-1]
    assert found == [found[-1]] * 4


def test_a_continuation_is_text_and_no_markdown(tab: Any, keyed: Live) -> None:
    """Of models that do not chat; the control is the same text of one that does."""
    enter(tab)
    lines = ["# a", "", "**b**", "  c"]
    tab.evaluate("() => { clearTimeout(timer); chats = false; }")  # which the next state would set back
    answer(tab, "\n".join(lines), 3)
    found = tab.evaluate("[...document.querySelectorAll('.answer .plain')].map((one) => one.textContent)")
    assert [line.strip("\u200b") for line in found] == lines
    assert tab.query_selector("#log h3") is None
    tab.evaluate("() => { chats = true; }")
    answer(tab, "\n".join(lines), 3)
    assert tab.inner_text("#log h3") == "a"


@pytest.mark.parametrize("end", [True, False])
def test_the_end_of_a_conversation_stays_in_view_where_its_place_shrinks(tab: Any, keyed: Live, end: bool) -> None:
    """The control has scrolled up, and stays there."""
    enter(tab)
    answer(tab, "one\n\ntwo\n\n" * 40, 100)
    frames = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    tab.evaluate("(end) => { const log = at('log'); log.scrollTop = end ? log.scrollHeight : 10; }", end)
    tab.evaluate(frames)
    tab.evaluate("() => { const log = at('log'); log.style.minHeight = '0'; log.style.flex = '0 0 200px'; }")
    tab.evaluate(frames)
    assert tab.evaluate("at('log').clientHeight") < 201
    if end:
        assert tab.evaluate("nearEnd(at('log'))")
    else:
        assert tab.evaluate("at('log').scrollTop") == 10


def test_answers_and_code_are_copied(browser: Any, keyed: Live) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(keyed.url)
    enter(page)
    answer(page, "Text **bold**\n\n```python\ndef f():\n    return 1\n```")
    page.click("text=Copy code")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f():\n    return 1"
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    page.click("text=Copy answer")  # as on an address that is no secure one
    page.wait_for_function("() => document.querySelectorAll('.copy')[1].textContent === 'Copied'")
    page.evaluate("delete navigator.clipboard")
    assert page.evaluate("navigator.clipboard.readText()") == "Text **bold**\n\n```python\ndef f():\n    return 1\n```"
    context.close()


def test_a_system_prompt_goes_before_the_conversation(tab: Any, keyed: Live) -> None:
    enter(tab)
    roles = "asked('q')[1].messages.map((one) => one.role + ': ' + one.content)"
    assert tab.evaluate(roles) == ["user: q"]
    tab.click("#system-part summary")
    tab.fill("#system", " Be brief. ")
    assert tab.evaluate(roles)[:2] == ["system: Be brief.", "user: q"]


def test_answers_tell_speed_cache_and_what_drafting_saved(tab: Any, keyed: Live) -> None:
    enter(tab)
    assert "once there is an answer" in tab.inner_text("#saved")
    ask(tab, "one two three four one two three four one two")
    ask(tab, "one two three four one two three four one two")
    log = tab.inner_text("#log").replace("\N{NO-BREAK SPACE}", " ")
    sums = [line for line in log.splitlines() if "of them drafted" in line]
    assert len(sums) == 2
    written = sum(int(re.findall(r"(\d+) tokens?, ", line)[0]) for line in sums)
    assert all(re.search(r"\d s \([\d.]+ tokens/s\), the first token after \d+\.\d\d s", line) for line in sums)
    assert re.search(r"[1-9]\d* of \d+ prompt tokens from the cache", sums[1])
    told = tab.inner_text("#saved").replace("\N{NO-BREAK SPACE}", " ")
    assert re.match(rf"This conversation: {written} tokens in \d+ steps", told), told
    assert re.search(r"Drafting saved (nothing|[\d.]+ s and \d+ steps?)", told) or "is not measured yet" in told
    tab.click("#clear")
    assert "once there is an answer" in tab.inner_text("#saved")


@pytest.mark.parametrize(
    ("plain", "words", "figure"),
    [(3.0, "Drafting saved 1.0 s and 10 steps (33 % of the time).", "1.0 s"),
     (2.0, "Drafting saved nothing: 10 steps fewer, but steps with drafts take longer.", "nothing"),
     (1.5, "Drafting saved nothing, and cost 0.5 s: 10 steps fewer, but steps with drafts take longer.", "nothing")],
)  # fmt: skip
def test_what_drafting_did_not_save_is_said(tab: Any, keyed: Live, plain: float, words: str, figure: str) -> None:
    enter(tab)
    counted = {"tokens": 30, "steps": 20, "priced_tokens": 30, "priced_seconds": 2.0, "plain_seconds": plain}
    tab.evaluate("(counted) => { addAnswer(counted, 30); drawHead(); drawPlan(); }", counted)
    assert tab.inner_text("#saved").replace("\N{NO-BREAK SPACE}", " ").endswith(words)
    assert tab.inner_text("#figures dd >> nth=3").replace("\N{NO-BREAK SPACE}", " ") == figure


def test_the_last_tree_with_drafts_stays_where_the_server_has_forgotten_it(tab: Any, keyed: Live) -> None:
    enter(tab)
    ask(tab, "one two three four one two three four one two")
    tab.wait_for_function("() => document.querySelectorAll('#tree .node').length > 2")
    empty = """(more) => {
        const found = structuredClone(state);
        Object.assign(found.tree, { id: "later", at: 1, tokens: 1, drafts: 0 }, more);
        found.tree.step.nodes = [];
        take(found);
        return document.querySelectorAll("#tree .node").length;
    }"""
    assert tab.evaluate(empty, {}) > 2
    tab.evaluate("seen = null")  # as if another request had been chosen, the control
    assert tab.evaluate(empty, {}) <= 2


def test_a_hostile_answer_is_text_and_markdown(browser: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded by a model, streamed and rendered under the page's policy, which has nothing to block."""
    model = Scripted(llm)
    monkeypatch.setattr(model, "script", "**bold** <img src=x onerror='window.broken = 1'> [a](javascript:alert(1))")
    for live in serve(model, max_request_tokens=120):
        page = browser.new_page()
        page.add_init_script(WATCH)
        page.goto(live.url)
        page.wait_for_selector("#live:not([hidden])")
        ask(page, "hello")
        assert page.inner_text("#log .answer strong") == "bold"
        assert "<img src=x onerror='window.broken = 1'> [a](javascript:alert(1))" in page.inner_text("#log .answer")
        assert page.query_selector("#log img, #log a") is None
        assert page.evaluate("[faults, window.broken]") == [[], None]
        page.close()


def test_an_unsafe_renderer_would_run_it(browser: Any, keyed: Live) -> None:
    """The control: in the same page HTML would run but for the policy, and `faults` tells where that blocks it."""
    html = "(text) => { document.getElementById('log').innerHTML = text; }"
    for bypass in (True, False):
        context = browser.new_context(bypass_csp=bypass)
        page = context.new_page()
        page.add_init_script(WATCH)
        page.goto(keyed.url)
        enter(page)
        page.evaluate(html, EVIL)
        page.wait_for_function("() => window.broken || faults.length")
        assert page.evaluate("window.broken") == (1 if bypass else None)
        assert any("blocked" in one for one in page.evaluate("faults")) is not bypass
        context.close()


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
    order = """["figures", "saved", "speed", "log", "plan", "tree", "drafters"]
        .map((id) => document.getElementById(id).getBoundingClientRect().top + scrollY)"""
    tops = tab.evaluate(order)
    assert tops[2] < 500  # a chart is seen at once
    assert width > 400 or tops == sorted(tops)
    tab.click("#how summary")
    tab.click("#system-part summary")
    wide = "| a | b |\n|---|---|\n| " + "word " * 40 + "| " + "w" * 200 + " |"
    code = f"```python\n{'code ' * 60}\n```"
    answer(tab, f"# {'t' * 200}\n\n{code}\n\n{wide}\n\n{'x' * 300} `{'y' * 300}` https://e.org/{'z' * 300}")
    assert tab.evaluate("document.getElementById('log').scrollWidth <= document.getElementById('log').clientWidth")
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
    for _ in range(20):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or reached[-1] == "BODY"
    assert [one for one in reached if one != "BODY"][:11] == [
        "SUMMARY", "log", "SUMMARY", "question", "send", "clear", "temperature",
        "SUMMARY", "request", "tree", "SUMMARY",
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
