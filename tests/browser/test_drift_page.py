"""The page of ``samebits drift`` as a person has it: at a desk and on a phone, with a keyboard, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from browser.chromium import DESKTOP, PHONE, Browser, Seen
from drift.models import Net, Nudged, batch
from torch import Tensor, nn

from samebits.verify.drift import drift, page
from samebits.verify.trace import Trace, trace

DEPTH = 70
"""More calls inside each other than any screen is wide, and than the page nests."""


class Deep(nn.Module):
    def __init__(self, depth: int, wrong: bool) -> None:
        super().__init__()
        self.a_long_name_without_any_place_to_break = nn.Tanh()
        self.child = Deep(depth - 1, wrong) if depth else Nudged(nn.Tanh()) if wrong else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.a_long_name_without_any_place_to_break(x))


def net(wrong: bool = False, weight: float = 1) -> nn.Module:
    model = Net(blocks=4)
    if wrong:
        model.blocks[2].up = Nudged(model.blocks[2].up, 2)
    torch.nn.init.constant_(model.blocks[0].norm.weight, weight)
    return model


PAIRS = {
    "same bits": lambda: (net(), net()),
    "drift": lambda: (net(), net(wrong=True)),
    "other weights": lambda: (net(), net(weight=2)),
    "deep": lambda: (Deep(DEPTH, False), Deep(DEPTH, True)),
}


def record(model: nn.Module) -> Trace:
    with trace(model, rows=True, tensors=True) as recording:
        model(batch().requires_grad_()).sum().backward()
    return recording.trace


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, pair in PAIRS.items():
        page.write(drift(*map(record, pair())), folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in PAIRS}


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", PAIRS)
def test_nothing_is_wrong(browser: Browser, pages: dict[str, Path], name: str, size: tuple[int, int]):
    with browser.page(pages[name], size) as opened:
        assert opened.look() == Seen()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["drift", "deep"])
def test_a_key_leads_from_the_verdict_to_the_first_drift(
    browser: Browser, pages: dict[str, Path], name: str, size: tuple[int, int]
):
    with browser.page(pages[name], size) as opened:
        opened.run("document.querySelector('.tile[href=\"#first-forward\"]').focus()")
        opened.press("Enter")
        place = opened.run(
            "(() => { const r = document.querySelector('.call.first > .mark, .call.first > summary > .mark')"
            ".getBoundingClientRect(); return [r.left, r.right, r.top, innerHeight] })()"
        )
        left, right, top, height = place
        assert 0 <= left < right <= size[0] + 1 and 0 <= top < height


def test_every_tile_leads_somewhere(browser: Browser, pages: dict[str, Path]):
    for path in pages.values():
        with browser.page(path, DESKTOP) as opened:
            found = opened.run(
                "[...document.querySelectorAll('.tile')].map(t => [t.hash, !!document.querySelector(t.hash)])"
            )
            assert len(found) >= 3 and all(there for _, there in found), found


def test_what_agrees_is_folded_and_a_key_unfolds_it(browser: Browser, pages: dict[str, Path]):
    shown = "document.querySelector('details.good details.good .call').checkVisibility()"
    with browser.page(pages["drift"], PHONE) as opened:
        assert not opened.run(shown)
        assert opened.run("document.querySelector('.call.first').checkVisibility()"), "what differs is open"
        opened.run("document.querySelector('details.good details.good > summary').focus()")
        opened.press("Enter")
        assert opened.run(shown)


def test_agreement_has_its_colour(browser: Browser, pages: dict[str, Path]):
    colour = "getComputedStyle(document.querySelector('%s')).borderLeftColor"
    with browser.page(pages["other weights"], DESKTOP) as opened:
        bad, carried = (opened.run(colour % kind) for kind in (".call.bad", ".call.none"))
    with browser.page(pages["same bits"], DESKTOP) as opened:
        good = opened.run(colour % ".call.good")
        assert opened.run("document.querySelectorAll('.call.bad, .call.none, .first').length") == 0
    assert len({good, bad, carried}) == 3
