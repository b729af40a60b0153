"""What the look at a page can find, it finds: one planted fault each, and a page without any."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser.chromium import DESKTOP, PHONE, Browser, Seen

GOOD = '<p>text</p><a href="#here">link</a><details><summary>more</summary><a href="#there">inside</a></details>'


def look(browser: Browser, folder: Path, body: str, size: tuple[int, int] = DESKTOP) -> Seen:
    page = folder / "page.html"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    page.write_text(f"<!doctype html><html><head>{head}</head><body>{body}</body></html>")
    with browser.page(page, size) as opened:
        return opened.look()


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_a_good_page(browser: Browser, tmp_path: Path, size: tuple[int, int]):
    wide = '<div style="overflow-x: auto"><div style="width: 2000px">a table that scrolls by itself</div></div>'
    assert look(browser, tmp_path, GOOD + wide, size) == Seen()


def test_what_the_console_says(browser: Browser, tmp_path: Path):
    seen = look(browser, tmp_path, GOOD + "<script>console.error('one', 2); undefined_name()</script>")
    assert seen.said == ["one 2", "Uncaught"] and not seen.too_wide


def test_what_is_loaded_from_elsewhere(browser: Browser, tmp_path: Path):
    seen = look(
        browser, tmp_path, GOOD + '<img src="http://example.test/a.png"><img src="data:image/gif;base64,R0lGODlh">'
    )
    assert seen.loaded == ["http://example.test/a.png"]
    assert any("ERR_NAME_NOT_RESOLVED" in text for text in seen.said), "nothing outside answers"


def test_what_is_wider_than_a_phone(browser: Browser, tmp_path: Path):
    body = GOOD + '<div class="wide" style="width: 600px">wide</div>'
    assert look(browser, tmp_path, body, PHONE).too_wide == ["div.wide"]
    assert look(browser, tmp_path, body, DESKTOP) == Seen()


def test_what_the_keyboard_cannot_reach(browser: Browser, tmp_path: Path):
    body = GOOD + '<div onclick="1">click me</div><button style="outline: none">unmarked</button>'
    seen = look(browser, tmp_path, body)
    assert seen.unreachable == ["div click me"] and seen.unmarked == ["button unmarked"]
