"""The documentation site in a real browser, where `make docs` has built it: it fits, loads nothing, is searched."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.conftest import leave, prefers, resize, wait

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = [
    "",
    "guide/01-tensors/",
    "operations/",
    "decides/",
    "comparison/",
    "api/regions/",
    "zh/guide/08-mixed-precision/",
]


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not (SITE / "search" / "search_index.json").exists():
        pytest.skip("the site is not built here; write: make docs")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def visit(browser: Any, address: str, page: str, scheme: str = "light") -> None:
    """Opens a page as somebody who has never been there, and prefers light or dark."""
    leave(browser)  # to where no script of the site still writes down what it showed
    prefers(browser, scheme)
    # Cleared by the page itself, before its own scripts: what the browser clears from outside may
    # reach a page later than they ask for it, which then shows what an earlier test preferred.
    forget = {"source": "localStorage.clear()"}
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", forget)
    browser.get(address + page)
    wait(browser, f"location.href.startsWith({address!r}) && document.readyState === 'complete'")
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_and_loads_nothing_from_elsewhere(
    browser: Any, address: str, page: str, width: int
) -> None:
    resize(browser, width)
    visit(browser, address, page)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    sent = [json.loads(each["message"])["message"] for each in browser.get_log("performance")]
    asked = [
        m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"
    ]
    assert asked
    assert {urlsplit(url).netloc for url in asked if not url.startswith("data:")} == {
        urlsplit(address).netloc
    }
    told = [each["message"] for each in browser.get_log("browser")]
    assert [message for message in told if "sitemap.xml" not in message] == []  # asked for in vain


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_a_page_is_light_or_dark_as_its_reader_prefers(
    browser: Any, address: str, scheme: str, dark: bool
) -> None:
    visit(browser, address, "guide/08-mixed-precision/", scheme)
    wait(browser, "document.body.dataset.mdColorMedia")  # it has chosen
    page = (SITE / "guide" / "08-mixed-precision" / "index.html").read_text(encoding="utf-8")
    pictures = page.count("<figure>")
    assert pictures
    ground = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"
    )
    assert (browser.execute_script(f"return {ground}") < 380) is dark
    images = "[...document.querySelectorAll('figure img')].filter(image => image.offsetParent)"
    shown = f"{images}.map(image => image.src.match(/(\\w+).svg/)[1])"
    assert browser.execute_script(f"return {shown}") == [scheme] * pictures


@pytest.mark.parametrize(
    ("page", "words", "leads"),
    [
        ("", "gradient scaler", "/scaler/"),
        ("", "LossScalers", "#precast.LossScalers"),
        ("", "softmax naive", "/guide/07-stability/"),
        ("zh/", "混合精度", "/zh/guide/08-mixed-precision/"),
        ("zh/", "梯度缩放", "/zh/"),
    ],
)
def test_what_is_typed_is_found(
    browser: Any, address: str, page: str, words: str, leads: str
) -> None:
    resize(browser, 1280)
    visit(browser, address, page)
    browser.execute_script("document.querySelector('.md-search__input').focus()")
    browser.switch_to.active_element.send_keys(words)
    links = "[...document.querySelectorAll('.md-search-result__link')].map(a => decodeURI(a.href))"
    # Its first letters find something, too, and are looked for first.
    wait(browser, f"{links}.some(link => link.includes('{leads}'))")


@pytest.mark.parametrize(
    ("page", "words", "first"), [("", "install", "/start/"), ("zh/", "安装", "/zh/start/")]
)
def test_who_looks_for_the_installation_finds_start_here_first(
    browser: Any, address: str, page: str, words: str, first: str
) -> None:
    resize(browser, 1280)
    visit(browser, address, page)
    browser.execute_script("document.querySelector('.md-search__input').focus()")
    browser.switch_to.active_element.send_keys(words)
    link = "document.querySelector('.md-search-result__link')"
    wait(browser, f"{link} && new URL({link}.href).pathname === '{first}'")


def test_the_navigation_folds(browser: Any, address: str) -> None:
    resize(browser, 1280)
    visit(browser, address, "")
    chapter = "document.querySelector('.md-sidebar--primary a[href=\"guide/02-modules/\"]')"
    is_shown = f"{chapter}.checkVisibility({{visibilityProperty: true}})"
    heading = f"{chapter}.closest('.md-nav__item--nested')"
    assert not browser.execute_script(f"return {is_shown}")
    for expected in ("true", "false"):
        browser.execute_script(f"{heading}.querySelector('.md-nav__toggle').click()")
        wait(browser, f"{is_shown} === {expected}")


def test_a_page_leads_to_itself_in_the_other_language(browser: Any, address: str) -> None:
    resize(browser, 1280)
    visit(browser, address, "guide/03-broadcasting/")
    browser.execute_script("document.querySelector('.md-select__link[hreflang=zh]').click()")
    wait(browser, "location.pathname.startsWith('/zh/')")
    assert browser.current_url == f"{address}zh/guide/03-broadcasting/"
