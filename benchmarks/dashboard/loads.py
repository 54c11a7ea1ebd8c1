"""Loads of the dashboard's pages in a real browser: how long each takes, and what it weighs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any, Final
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, Request

from benchmarks.dashboard.browser import chromium

DESK: Final = {"width": 1280, "height": 860}
TIMEOUT_MS: Final = 60_000
# by the page's address: what is there once it is drawn, as a selector
PAGES: Final = {
    "fleet": ".table tbody tr",
    "device/cam-0007": ".chart canvas",
    "models": ".chart canvas",
    "rollouts": ".table tbody tr",
    "training": ".chart canvas",
    "alerts": ".card, .empty",
    "audit": ".event",
}


@dataclass(frozen=True, slots=True)
class PageLoad:
    """Loads of one page.

    Attributes:
        seconds: from the begin of the navigation until all is drawn, with an empty cache; medians.
        again_s: likewise with the files in the cache.
        bytes: over the network with an empty cache, bodies and headers of all answers.
        requests: their number.
    """

    page: str
    seconds: float
    again_s: float
    bytes: int
    requests: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of an open page, `at_s` seconds after its first one."""

    at_s: float
    path: str


class Visitor:
    """A person who is signed in, in a browser."""

    def __init__(self, browser: Browser, http: str, link: str) -> None:
        self._browser = browser
        self._http = http
        with self._page() as page:
            page.goto(f"{http}/#/sign-in/{link}")
            page.get_by_role("heading", name="Fleet").wait_for(timeout=TIMEOUT_MS)
            self.cookies: Any = page.context.cookies()

    def load(self, name: str, devices: int, times: int) -> PageLoad:
        """Load a page some times, each in a browser's profile of its own."""
        rows = {"fleet": devices, "rollouts": devices // 10, "device/cam-0007": 5, "training": 4}
        selector, least = PAGES[name], rows.get(name, 1)
        firsts, again, weights, requests = [], [], [], 0
        for _ in range(times):
            answers: list[Request] = []

            def note(request: Request, found: list[Request] = answers) -> None:
                found.append(request)

            with self._page() as page:
                page.on("requestfinished", note)
                firsts.append(self._open(page, name, selector, least))
                page.wait_for_load_state("networkidle")
                weights.append(sum(map(_weight, answers)))
                requests = len(answers)
                page.goto("about:blank")
                again.append(self._open(page, name, selector, least))
        median = statistics.median
        weight = int(median(weights))
        return PageLoad(name.partition("/")[0], median(firsts), median(again), weight, requests)

    def watch(self, name: str, seconds: float) -> list[Asked]:
        """The requests for facts that an open page sends in a time, its first ones included."""
        found: list[Asked] = []
        with self._page() as page:
            began = time.monotonic()

            def note(request: Request) -> None:
                parts = urlsplit(request.url)
                if "/facts/" in parts.path:
                    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
                    found.append(Asked(time.monotonic() - began, path))

            page.on("request", note)
            page.goto(f"{self._http}/#/{name}")
            page.wait_for_timeout(1e3 * seconds)
        return found

    @contextmanager
    def _page(self) -> Iterator[Page]:
        context = self._browser.new_context(viewport=DESK)  # type: ignore[arg-type]  # a plain dict
        try:
            if hasattr(self, "cookies"):
                context.add_cookies(self.cookies)
            yield context.new_page()
        finally:
            context.close()

    def _open(self, page: Page, name: str, selector: str, least: int) -> float:
        """Open a page and wait until it is drawn; the seconds that it took."""
        began = time.perf_counter()
        page.goto(f"{self._http}/#/{name}", wait_until="commit")
        drawn = "([one, least]) => document.querySelectorAll(one).length >= least"
        page.wait_for_function(drawn, arg=[selector, least], timeout=TIMEOUT_MS)
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return time.perf_counter() - began


@contextmanager
def visitor(http: str, link: str) -> Iterator[Visitor]:
    """A browser in which somebody has signed in with this link's secret."""
    with chromium() as browser:
        yield Visitor(browser, http, link)


class Replay:
    """The requests of an open page, sent again and again without a browser beside the server.

    Args:
        asked: what the page sent in `span_s` seconds.
        cookies: of the browser that sent it.
    Attributes:
        requests: that were answered. done: whether all of them were.
    """

    def __init__(self, http: str, asked: list[Asked], span_s: float, cookies: Any) -> None:
        self._server = urlsplit(http).netloc
        self._asked = asked
        self._span_s = span_s
        self._tags: dict[str, str] = {}
        self._cookie = "; ".join(f"{one['name']}={one['value']}" for one in cookies)
        self.requests = 0
        self.done = False

    def run(self, seconds: float) -> None:
        """Send them for so long."""
        began = time.monotonic()
        turns = range(int(seconds / self._span_s) + 1)
        due = [(turn * self._span_s + one.at_s, one.path) for turn in turns for one in self._asked]
        for at_s, path in due:
            if at_s >= seconds:
                break
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            # the server ends connections that are idle for 5 s, as a browser's are in between
            with closing(HTTPConnection(self._server, timeout=TIMEOUT_MS / 1e3)) as connection:
                self._send(connection, path)
        self.done = True

    def _send(self, connection: HTTPConnection, path: str) -> None:
        headers = {"Cookie": self._cookie, "Accept-Encoding": "gzip, deflate"}
        if path in self._tags:
            headers["If-None-Match"] = self._tags[path]
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status not in (200, 304):
            raise RuntimeError(f"{path}: status {answer.status}")
        self._tags[path] = answer.headers.get("etag", "")
        self.requests += 1


def _weight(request: Request) -> int:
    sizes = request.sizes()
    return sizes["responseBodySize"] + sizes["responseHeadersSize"]
