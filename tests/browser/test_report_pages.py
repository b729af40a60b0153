"""The other pages, empty and full, at a desk and on a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser.chromium import DESKTOP, PHONE, Browser, Seen
from report import test_page as recorded
from report import test_replays as replayed

from samebits.report import load, pages, replays, write


def full() -> str:
    lines = (recorded._line(), recorded._line(shape={"T": 1, "D": 4096}, us=4.0))
    return write.render(load.Recorded((), None, recorded.AUDIT, (recorded.MODEL,) * 2, lines), recorded.STAMP)


PAGES = {
    "report, nothing run": lambda: write.render(load.Recorded(), recorded.STAMP),
    "report, full": full,
    "replay": lambda: pages.tables_page(replays.page(replayed.REPLAY)),
}


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wrong(browser: Browser, tmp_path: Path, name: str, size: tuple[int, int]):
    page = tmp_path / "index.html"
    page.write_text(PAGES[name]())
    with browser.page(page, size) as opened:
        assert opened.look() == Seen()
