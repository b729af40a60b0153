"""The other pages, empty and full, at a desk and on a phone."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from pathlib import Path

import pytest
from browser.chromium import DESKTOP, PHONE, Browser, Seen
from report import test_page as recorded
from report import test_replays as replayed

from samebits.report import load, model_replays, pages, replays, write


def png(width: int, height: int) -> bytes:
    """A white picture."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress((b"\0" + b"\xff" * width) * height))
    return b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"IEND", b"")


def full() -> str:
    lines = (recorded._line(), recorded._line(shape={"T": 1, "D": 4096}, us=4.0))
    return write.render(load.Recorded((), None, recorded.AUDIT, (recorded.MODEL,) * 2, lines), recorded.STAMP)


PICTURE = pages.Picture("nodes", "What a PNG shows.", png(1200, 400))
TIMED = replayed.changed(latency_us=replayed.TIMED)
RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"


def whole(name: str) -> str:
    """The page of a committed record."""
    return pages.tables_page(model_replays.page(load.replay(RECORDS / name)))


PAGES = {
    "a whole model": lambda: whole("minimax_h3_model_replay.json"),
    "a generation": lambda: whole("minimax_h3_generation_replay.json"),
    "report, nothing run": lambda: write.render(load.Recorded(), recorded.STAMP),
    "report, full": full,
    "replay": lambda: pages.tables_page(replays.page(replayed.REPLAY)),
    "replay, with times, a command and a picture": lambda: pages.tables_page(
        dataclasses.replace(replays.page(TIMED | {"command": "samebits replay " * 9}), pictures=[PICTURE])
    ),
}


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wrong(browser: Browser, tmp_path: Path, name: str, size: tuple[int, int]):
    page = tmp_path / "index.html"
    page.write_text(PAGES[name]())
    with browser.page(page, size) as opened:
        assert opened.look() == Seen()
