"""The report in a real browser: it loads in silence, is searched, sorted, switched, printed, and fits a phone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from precast import report
from tests.browser.conftest import prefers, resize, wait
from tests.support.documents import document, flat, with_rows

Opened = Callable[..., Any]
KEYS = {"Enter": ("\r", 13), "ArrowLeft": ("", 37), "Tab": ("", 9), " ": (" ", 32)}


def press(browser: Any, key: str) -> None:
    text, code = KEYS[key]
    common = {"key": key, "windowsVirtualKeyCode": code, "nativeVirtualKeyCode": code}
    browser.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyDown", "text": text, **common})
    browser.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyUp", **common})


def ask(browser: Any, script: str, *arguments: Any) -> Any:
    return browser.execute_script(f"return {script}", *arguments)


def put(browser: Any, selector: str, value: str) -> None:
    browser.execute_script(
        "const it = document.querySelector(arguments[0]); it.value = arguments[1];"
        "for (const kind of ['input', 'change']) it.dispatchEvent(new Event(kind, {bubbles: true}))",
        selector,
        value,
    )


def column(browser: Any, table: str, title: str) -> list[str]:
    """The cells below a title, as they are shown."""
    return ask(
        browser,
        """(() => {
        const host = document.querySelector(`[data-table="${arguments[0]}"]`);
        const place = [...host.querySelectorAll('thead th')].findIndex(
            (head) => head.textContent === arguments[1]);
        return [...host.querySelectorAll('tbody tr')].map((row) => row.cells[place].textContent);
        })()""",
        table,
        title,
    )


def sort_by(browser: Any, table: str, title: str) -> str:
    """Clicks a title; the order that the table then says it has."""
    return ask(
        browser,
        """(() => {
        const host = document.querySelector(`[data-table="${arguments[0]}"]`);
        const head = [...host.querySelectorAll('thead th')].find((h) => h.textContent === arguments[1]);
        head.querySelector('button').click();
        return head.getAttribute('aria-sort');
        })()""",
        table,
        title,
    )


def ranks(count: int) -> dict[str, Any]:
    parts = [
        document(layers=2, steps=30, rank=rank, world_size=count, overflow_at=20 - rank)
        for rank in range(count)
    ]
    return dict(report.merge(parts))


def one_watched() -> dict[str, Any]:
    made = document(layers=1, overflow_at=None)
    made["health"]["modules"] = made["health"]["modules"][:1]
    return made


# --- loading ---


DOCUMENTS = {
    "a run that overflows": document,
    "a healthy run": lambda: document(overflow_at=None),
    "the shortest run": flat,
    "ten thousand rows": lambda: with_rows(10_000),
    "three ranks": lambda: ranks(3),
    "one module watched": one_watched,
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_it_loads_in_silence_asks_for_nothing_and_fits(name: str, opened: Opened) -> None:
    browser = opened(DOCUMENTS[name](), 360)
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = {
        message["params"]["request"]["url"].split(":")[0]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    }
    assert requests <= {"file", "data", "blob"}
    for width in (360, 1280):
        resize(browser, width)
        assert ask(browser, "document.documentElement.scrollWidth") <= width
        assert browser.get_log("browser") == []


def test_the_browser_would_not_let_it_ask(opened: Opened) -> None:
    browser = opened(flat())
    refused = browser.execute_async_script(
        "fetch('https://example.org').then(() => arguments[0](false), () => arguments[0](true))"
    )
    assert refused
    assert any(
        "Content Security Policy" in entry["message"] for entry in browser.get_log("browser")
    )


def test_nothing_overflows_with_the_longest_of_names(opened: Opened) -> None:
    made = document(layers=2)
    long = "decoder." + "a_very_long_name_without_any_break" * 5
    made["trace"]["rows"][0] |= {"module": long, "seconds": 9.0, "source": long + ".py:3"}
    made["health"]["modules"][0]["name"] = long
    made["findings"][0]["title"] = long
    made["run"]["command"] = [long]
    made["steps"][23]["first"]["name"] = long
    browser = opened(made, 360)
    assert ask(browser, "document.documentElement.scrollWidth") <= 360


# --- the table ---


def test_a_search_wants_all_words_and_says_how_many_rows_it_found(opened: Opened) -> None:
    made = document()
    browser = opened(made)
    put(browser, "[data-table=rows] input", "softmax decoder.3 BACKWARD")
    expected = [
        row["module"]
        for row in made["trace"]["rows"]
        if row["op"].startswith("softmax")
        and row["phase"] == "backward"
        and "decoder.3" in row["module"]
    ]
    assert column(browser, "rows", "Module") == expected
    status = "document.querySelector('[data-table=rows] [role=status]').textContent"
    assert ask(browser, status) == f"1 of {len(made['trace']['rows'])}"
    put(browser, "[data-table=rows] input", "nowhere to be found")
    rows = "[...document.querySelectorAll('[data-table=rows] tbody td')].map((cell) => cell.textContent)"
    assert ask(browser, rows) == ["Nothing fits."]


def test_a_title_sorts_and_sorts_back(opened: Opened) -> None:
    made = document()
    browser = opened(made)
    slowest = sorted(made["trace"]["rows"], key=lambda row: -row["seconds"])
    assert column(browser, "rows", "Module")[:25] == [row["module"] for row in slowest[:25]]
    assert sort_by(browser, "rows", "Time") == "ascending"
    assert column(browser, "rows", "Module")[0] == slowest[-1]["module"]
    assert sort_by(browser, "rows", "Operation") == "ascending"
    operations = sorted(row["op"] for row in made["trace"]["rows"])
    assert column(browser, "rows", "Operation") == operations[:25]
    assert sort_by(browser, "rows", "Operation") == "descending"
    assert column(browser, "rows", "Operation") == operations[::-1][:25]


def test_ten_thousand_rows_are_in_the_file_and_a_page_of_them_in_the_document(
    opened: Opened,
) -> None:
    browser = opened(with_rows(10_000))
    nodes = "document.querySelectorAll('*').length"
    assert ask(browser, nodes) < 4_000
    assert len(column(browser, "rows", "Module")) == 25
    put(browser, "[data-table=rows] input", "decoder.499.mlp.down")
    assert set(column(browser, "rows", "Module")) == {"decoder.499.mlp.down"}
    assert ask(browser, nodes) < 4_000
    pages = "document.querySelector('[data-table=rows] .pages').hidden"
    assert ask(browser, pages) is True


def test_a_row_tells_its_reason_by_keyboard(opened: Opened) -> None:
    browser = opened(document())
    browser.execute_script("document.querySelector('[data-table=rows] tbody button').focus()")
    press(browser, "Enter")
    detail = "document.querySelector('[data-table=rows] .detail')?.textContent ?? ''"
    assert "policy default: linear = 'lower'" in ask(browser, detail)
    assert "train.py:31" in ask(browser, detail)
    press(browser, "Enter")
    assert ask(browser, detail) == ""


# --- charts ---


def heat(browser: Any) -> Any:
    return ask(browser, "document.querySelector('[data-chart=exponents]').data[0].z")


def test_the_slider_shows_another_step_by_keyboard(opened: Opened) -> None:
    browser = opened(document())
    shown = "document.querySelector('#step-shown').textContent"
    last = heat(browser)
    assert ask(browser, shown) == "50"
    browser.execute_script("document.querySelector('#step').focus()")
    press(browser, "ArrowLeft")
    assert ask(browser, shown) == "40"
    assert heat(browser) != last


def limits(dtype: torch.dtype) -> list[float]:
    """Between which columns numbers become zero, normal and infinite, by PyTorch's casts of the middle of each."""
    at = {
        e: float(torch.tensor(1.5 * 2.0**e, dtype=torch.float64).to(dtype)) for e in range(-60, 60)
    }
    zero = max(e for e, number in at.items() if number == 0)
    normal = min(e for e in at if 1.5 * 2.0**e >= torch.finfo(dtype).smallest_normal)
    finite = max(e for e in at if 1.5 * 2.0**e <= torch.finfo(dtype).max)
    return [zero + 0.5, normal - 0.5, finite + 0.5]


def test_the_heat_map_shows_the_shares_of_the_document(opened: Opened) -> None:
    made = document(layers=1)
    browser = opened(made)
    put(browser, "#kind", "gradient")
    [first, *_] = [m for m in made["health"]["modules"] if m["kind"] == "gradient"]
    counts, low = first["histogram"]["counts"][-1], first["histogram"]["low"]
    trace = ask(browser, "document.querySelector('[data-chart=exponents]').data[0]")
    shown = dict(zip(trace["x"], trace["z"][0], strict=True))
    for place, count in enumerate(counts):
        if count:
            assert 10 ** shown[low + place] == pytest.approx(count / sum(counts))
    lines = ask(
        browser, "document.querySelector('[data-chart=exponents]').layout.shapes.map((s) => s.x0)"
    )
    assert lines == limits(torch.float16)
    put(browser, "#format", "float8_e4m3fn")
    lines = ask(
        browser, "document.querySelector('[data-chart=exponents]').layout.shapes.map((s) => s.x0)"
    )
    assert lines == limits(torch.float8_e4m3fn)


def test_skipped_steps_are_marked_and_the_offender_is_named(opened: Opened) -> None:
    made = document()
    browser = opened(made)
    chart = "document.querySelector('[data-chart=steps]')"
    skipped = [step["step"] for step in made["steps"] if step["skipped"]]
    assert ask(browser, f"{chart}.data[1].x") == skipped
    assert column(browser, "skipped", "First that was not finite") == ["decoder.10.mlp.down"] * 3


def test_what_is_not_there_is_said_in_words(opened: Opened) -> None:
    """No titles without rows, no buttons to turn the pages of nothing."""
    browser = opened(document(overflow_at=None))
    table = "document.querySelector('[data-table={}]').textContent"
    assert ask(browser, table.format("skipped")) == "No step was skipped."
    opened(flat())
    assert ask(browser, table.format("rows")) == "No operation was traced."
    shown = "document.querySelector('main').innerText"
    for riddle in ("Previous", "nothing fits", "Nothing fits"):
        assert riddle not in ask(browser, shown)


def test_what_is_not_known_of_an_offender_is_not_called_infinite(opened: Opened) -> None:
    made: Any = document(layers=2)
    first = made["steps"][23]["first"]
    inputs = {"of": "the output of `a`", "dtype": "float16"}
    first["message"] = "In step 23 the output of `a.b` was the first to be infinite."
    first["inputs"] = [
        inputs | {"minimum": -2.0, "maximum": 3.0, "nonfinite": 0},
        inputs | {"minimum": None, "maximum": None, "nonfinite": 1},
    ]
    browser = opened(made)
    browser.find_element("css selector", "[data-table=skipped] tbody button").click()
    text = browser.find_element("css selector", "[data-table=skipped] .detail").text
    assert "`" not in text
    assert "float16, from -2 to 3\n" in text
    assert text.count("not finite") == 1
    assert "root mean square" not in text
    assert "1 not finite" not in text


@pytest.mark.parametrize("name", ["a run that overflows", "the shortest run"])
def test_charts_stay_clear_of_tables_when_the_window_changes(name: str, opened: Opened) -> None:
    browser = opened(DOCUMENTS[name]())
    sample = """[...document.querySelectorAll('.js-plotly-plot')].filter((chart) => chart.offsetHeight).map((chart) =>
        [chart.querySelectorAll('table').length, chart.querySelector('.main-svg').getBoundingClientRect().bottom
        - chart.getBoundingClientRect().bottom])"""
    for width, height in ((1280, 900), (900, 500), (360, 800)):
        resize(browser, width, height)
        for tables, below in ask(browser, sample):
            assert tables == 0
            assert below <= 0.5


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 15])
def test_a_short_run_has_whole_steps_and_all_its_losses(count: int, opened: Opened) -> None:
    made = document(layers=1, steps=count, overflow_at=None)
    browser = opened(made)
    chart = "document.querySelector('[data-chart=steps]')"
    ticks = ask(browser, f"[...{chart}.querySelectorAll('.xtick text')].map((t) => t.textContent)")
    assert len(set(ticks)) == len(ticks)
    assert set(ticks) <= {str(step["step"]) for step in made["steps"]}
    points = ask(
        browser,
        f"{chart}.querySelectorAll('.scatterlayer .trace')[0].querySelectorAll('.point').length",
    )
    assert points == count


def test_modules_open_by_keyboard(opened: Opened) -> None:
    browser = opened(document())
    names = "[...document.querySelectorAll('.tree code')].map((name) => name.textContent)"
    assert "mlp" not in ask(browser, names)
    browser.execute_script(
        "[...document.querySelectorAll('.tree summary')].find("
        "(each) => each.textContent.startsWith('3')).focus()"
    )
    press(browser, "Enter")
    wait(browser, f"{names}.includes('mlp')")


# --- themes and ranks ---


def ground(browser: Any) -> str:
    return ask(browser, "getComputedStyle(document.body).backgroundColor")


def test_the_theme_is_the_systems(opened: Opened) -> None:
    browser = opened(document())
    ink = "document.querySelector('[data-chart=steps]').layout.font.color"
    prefers(browser, "light")
    assert ground(browser) == "rgb(255, 255, 255)"
    assert ask(browser, ink) == "rgb(31, 35, 40)"
    prefers(browser, "dark")
    assert ground(browser) == "rgb(13, 17, 23)"
    assert ask(browser, ink) == "rgb(230, 237, 243)"


def contrast(first: str, second: str) -> float:
    """By the definition of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[4:-1].split(",")]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(theme: str, opened: Opened) -> None:
    browser = opened(document(layers=1))
    prefers(browser, theme)
    colours = ask(
        browser,
        """Object.fromEntries(['ground', 'card', 'ink', 'soft', 'link', 'good', 'warning', 'bad'].map((name) => {
        const probe = document.body.appendChild(document.createElement('i'));
        probe.style.color = `var(--${name})`;
        return [name, getComputedStyle(probe).color];
        }))""",
    )
    for ground_ in ("ground", "card"):
        for text in ("ink", "soft", "link", "good", "warning", "bad"):
            assert contrast(colours[text], colours[ground_]) >= 4.5, (text, ground_)


def test_controls_and_tables_can_be_told_by_those_who_see_nothing(opened: Opened) -> None:
    browser = opened(ranks(2))
    unlabelled = """[...document.querySelectorAll('input, select, button')].filter((each) => (
        !each.labels?.length && !each.textContent.trim() && !each.getAttribute('aria-label')
        )).map((each) => each.outerHTML)"""
    assert ask(browser, unlabelled) == []
    assert ask(
        browser, "[...document.querySelectorAll('table')].every((t) => t.caption && t.tHead)"
    )
    assert ask(
        browser, "[...document.querySelectorAll('thead th')].every((th) => th.scope === 'col')"
    )
    assert ask(browser, "[...document.querySelectorAll('[role=img]')].every((i) => i.ariaLabel)")
    order = ask(
        browser, "[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))"
    )
    assert all(after - before <= 1 for before, after in itertools.pairwise(order))


def test_another_rank_is_shown(opened: Opened) -> None:
    made = ranks(3)
    browser = opened(made)
    assert ask(browser, "document.querySelector('#rank').value") == "2"  # the first to overflow
    assert column(browser, "ranks", "Rank") == ["0", "1", "2"]
    skipped = [step["step"] for step in made["ranks"][0]["steps"] if step["skipped"]]
    put(browser, "#rank", "0")
    assert ask(browser, "document.querySelector('[data-chart=steps]').data[1].x") == skipped
    shown = "[...document.querySelectorAll('section.part')].filter((p) => !p.hidden).map((p) => p.ariaLabel)"
    assert ask(browser, shown) == ["Rank 0"]


# --- text that is not to be trusted ---

EVIL = [
    "</script><script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    '"; window.hit = 1; "',
    "'\"><b onmouseover=window.hit=1>",
    "{{ 7 * 7 }} {% raw %} `<i>code</i>`",
    "<!--<script>",
    "\u2028\u2029\u202e\x00\ud800 \N{SNOWMAN} \N{PILE OF POO}",
    "<a href='javascript:window.hit=1'>x</a>",
    "]]>&lt;&amp;",
]


def test_text_of_the_program_stays_text(opened: Opened) -> None:
    made = document(layers=2)
    template, finding, flow = (
        made["trace"]["rows"][0],
        made["findings"][0],
        made["trace"]["flow"][0],
    )
    for place, text in enumerate(EVIL):
        keys = ("module", "op", "source", "reason", "region", "rule", "module_rule")
        made["trace"]["rows"].append(
            template | dict.fromkeys(keys, text) | {"inputs": [text], "seconds": 99.0 - place}
        )
        made["trace"]["modules"].append({"name": text, "type": text})
        made["trace"]["flow"].append(flow | {"from": text})
        texts = dict.fromkeys(("title", "suggestion", "policy", "kind"), text)
        made["findings"].append(finding | texts)
        step = made["steps"][place]
        step |= {"skipped": True, "names": [text]}
        step["first"] = made["steps"][23]["first"] | {"name": text, "message": text, "step": place}
        made["health"]["modules"][place]["name"] = text
    everything = " ".join(EVIL)
    made["run"] |= {"command": EVIL, "message": everything, "ended": "exception"}
    made["run"]["machine"] = everything
    browser = opened(made)
    browser.execute_script(
        "for (const open of document.querySelectorAll('tbody button')) open.click();"
        "for (const each of document.querySelectorAll('details')) each.open = true"
    )
    assert ask(browser, "window.hit ?? null") is None
    assert browser.get_log("browser") == []
    made_by_text = (
        "document.querySelectorAll('img, [onerror], [onmouseover], main b, main a').length"
    )
    assert ask(browser, made_by_text) == 0
    shown = "[...document.querySelectorAll(arguments[0])].map((each) => each.textContent.toWellFormed())"
    operations = ask(browser, shown, "[data-table=rows] tr:not(.detail) td:first-child")
    titles = ask(browser, shown, "article h3")
    for text in EVIL:
        if text.isascii():
            assert text in operations
            assert text.replace("`", "") in titles


def test_the_verdict_needs_no_script(browser: Any, tmp_path: Path) -> None:
    report.write(document(), tmp_path / "report.html")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get((tmp_path / "report.html").as_uri())
        text = browser.find_element("id", "summary").text
        assert not browser.find_elements("css selector", ".js-plotly-plot")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "decoder.10.mlp.down" in text
    assert "Expected gain: up to 3 of 60 steps" in text
