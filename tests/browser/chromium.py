"""A headless Chromium, spoken to in its DevTools protocol: one JSON message after the other, each ended by a zero byte, over two
pipes. So a page is judged by a real browser, and the tests need no package for it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60
"""Seconds for an answer. A machine that runs many tests at once is slow."""
DESKTOP, PHONE = (1280, 800), (390, 844)
"""Width and height in CSS pixels."""
_FREE = 10
"""Numbers of file descriptors from here on are not 3 and 4, which Chromium reads and writes."""

_USABLE = """
(() => {
  const scrolls = e => /auto|scroll/.test(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth;
  const usable = e => e.matches('a[href], summary, button, input, select, textarea, [onclick], [tabindex]') || scrolls(e);
  window.usable = [...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && usable(e));
  return window.usable.map(e => e.tagName.toLowerCase() + ' ' + e.textContent.trim().replace(/\\s+/g, ' ').slice(0, 60));
})()
"""
_FOCUSED = """
(() => {
  const e = document.activeElement, style = getComputedStyle(e);
  return [window.usable.indexOf(e), style.outlineStyle !== 'none' || style.boxShadow !== 'none', e === document.body];
})()
"""
_TOO_WIDE = """
(() => {
  const width = %d, found = [];
  if (document.documentElement.scrollWidth <= width) return found;
  for (const e of document.querySelectorAll('body *'))
    if (e.getBoundingClientRect().right > width + 0.5) found.push(e.tagName.toLowerCase() + '.' + e.className);
  return found.length ? found : ['the page'];
})()
"""


def installed() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Seen:
    """What is wrong with a page; equal to ``Seen()`` if nothing is."""

    said: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and exceptions."""
    loaded: list[str] = field(default_factory=list)
    """Addresses that it asked for besides its own."""
    too_wide: list[str] = field(default_factory=list)
    """Elements that make the page scroll sideways."""
    unreachable: list[str] = field(default_factory=list)
    """What a mouse can use and the Tab key does not come to."""
    unmarked: list[str] = field(default_factory=list)
    """What shows no sign that it has the focus."""


class Browser:
    """One process; a page at a time. Nothing that a page asks of a host is answered."""

    def __init__(self, executable: str, profile: Path) -> None:
        their_input, self._to = _pipe()
        self._from, their_output = _pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        shell = f'exec "$@" 3<&{their_input} 4>&{their_output}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", executable, *options],
            pass_fds=(their_input, their_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        self._sent, self._read = 0, b""
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._ask("Browser.close", browser=True)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        os.close(self._to)
        os.close(self._from)

    @contextlib.contextmanager
    def page(self, path: Path, size: tuple[int, int]) -> Iterator[Page]:
        """A page that has loaded, on a screen of this size; a phone's if it is narrow."""
        target = self._ask("Target.createTarget", browser=True, url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", browser=True, targetId=target, flatten=True)["sessionId"]
        self._events.clear()
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._ask(f"{domain}.enable")
            width, height = size
            screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
            self._ask("Emulation.setDeviceMetricsOverride", **screen)
            self._ask("Page.navigate", url=path.as_uri())
            while not any(event["method"] == "Page.loadEventFired" for event in self._events):
                self._receive()
            yield Page(self, path.as_uri(), width)
        finally:
            self._session = None
            self._ask("Target.closeTarget", browser=True, targetId=target)

    def _ask(self, method: str, browser: bool = False, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if not browser:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next message; an event is kept too."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._read:
            if not select.select([self._from], [], [], max(end - time.monotonic(), 0))[0]:
                raise RuntimeError(f"the browser said nothing for {PATIENCE} seconds")
            more = os.read(self._from, 1 << 16)
            if not more:
                raise RuntimeError("the browser ended")
            self._read += more
        line, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self._events.append(message)
        return message


class Page:
    def __init__(self, browser: Browser, address: str, width: int) -> None:
        self._browser, self._address, self._width = browser, address, width

    def run(self, script: str) -> Any:
        """The value of an expression."""
        answer = self._browser._ask("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        for kind in ("keyDown", "keyUp"):
            given = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self._browser._ask(
                "Input.dispatchKeyEvent", **given, **({"text": text} if text and kind == "keyDown" else {})
            )

    def look(self) -> Seen:
        """Everything that is wrong with it."""
        seen = Seen(too_wide=self.run(_TOO_WIDE % self._width))
        self._walk(seen)
        for event in self._browser._events:
            method, about = event["method"], event["params"]
            if method == "Network.requestWillBeSent" and about["request"]["url"] != self._address:
                seen.loaded.append(about["request"]["url"])
            elif method == "Runtime.exceptionThrown":
                seen.said.append(about["exceptionDetails"]["text"])
            elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                seen.said.append(" ".join(str(value.get("value")) for value in about["args"]))
            elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                seen.said.append(about["entry"]["text"])
        seen.loaded = [address for address in seen.loaded if not address.startswith("data:")]
        return seen

    def _walk(self, seen: Seen) -> None:
        """Press Tab until the focus leaves the page."""
        usable = self.run(_USABLE)
        reached = set()
        for _ in range(len(usable) + 1):
            self.press("Tab")
            place, marked, left = self.run(_FOCUSED)
            if left:
                break
            reached.add(place)
            if place >= 0 and not marked:
                seen.unmarked.append(usable[place])
        seen.unreachable = [name for place, name in enumerate(usable) if place not in reached]


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FREE) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
