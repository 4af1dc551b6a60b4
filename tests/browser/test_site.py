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
    requests = [
        m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"
    ]
    assert requests
    assert {urlsplit(url).netloc for url in requests if not url.startswith("data:")} == {
        urlsplit(address).netloc
    }
    reports = [each["message"] for each in browser.get_log("browser")]
    assert [
        message for message in reports if "sitemap.xml" not in message
    ] == []  # asked for in vain


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
