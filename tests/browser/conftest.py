"""A browser for the tests of pages. Where none is installed they are deselected, as tests of a GPU are without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    executable = chromium.installed()
    assert executable is not None
    started = chromium.Browser(executable, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if chromium.installed() is not None:
        return
    left_out = [item for item in items if "browser" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
