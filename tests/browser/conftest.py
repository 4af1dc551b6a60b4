"""A headless Chromium for tests, without network; each page in a window of the size that is asked for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from precast import report

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1"),
)
_HOW = "install it: apt-get install chromium chromium-driver; pip install selenium"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all tests; skipped, with what to install, where there is none."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip(f"needs Chromium and its driver, and this machine has none; {_HOW}")
    webdriver = pytest.importorskip("selenium.webdriver", reason=f"needs selenium; {_HOW}")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SE_OFFLINE", "true")  # Selenium looks for no driver of its own
        for name in ("http_proxy", "HTTP_PROXY"):
            environment.delenv(name, raising=False)  # it would ask for the driver there, too
        started = webdriver.Chrome(options, webdriver.ChromeService(executable_path=driver))
    try:
        yield started
    finally:
        started.quit()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Callable[..., Any]:
    """`opened(document, width=1280, height=900)`: the page of a document, drawn."""

    def open_(document: dict[str, Any], width: int = 1280, height: int = 900) -> Any:
        path = tmp_path / "report.html"
        report.write(document, path)
        leave(browser)
        resize(browser, width, height)
        go(browser, path)
        return browser

    return open_


def go(browser: Any, page: Path) -> None:
    """Open a page, and wait until its scripts have drawn it: the driver may return before it has left the last one."""
    browser.get(page.as_uri())
    wait(browser, "document.documentElement.dataset.ready === 'true'")


def leave(browser: Any) -> None:
    """Goes to an empty page, where nothing is asked or said any more, and forgets what was."""
    browser.get("about:blank")
    for kind in ("browser", "performance"):
        browser.get_log(kind)


def resize(browser: Any, width: int, height: int = 900) -> None:
    """Gives the page so many CSS pixels, and waits until it has drawn itself anew."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wait(browser, f"innerWidth === {width} && innerHeight === {height}")
    # The page is told of it before the second frame, and Plotly draws 100 ms later: of two timers the one that is due
    # first is called first, however late.
    browser.execute_async_script(
        "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0], 200)))"
    )


def prefers(browser: Any, scheme: str) -> None:
    """Makes light or dark what the reader prefers, and waits until the page knows."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    wait(browser, f"matchMedia('(prefers-color-scheme: {scheme})').matches")


def wait(browser: Any, expression: str) -> None:
    """Until an expression is true in the page, which a busy machine may take long for."""
    until = time.monotonic() + 120
    while not browser.execute_script(f"return Boolean({expression})"):
        assert time.monotonic() < until, expression
        time.sleep(0.05)
