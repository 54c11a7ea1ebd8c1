"""A server of the v2 protocol for the tests of a module, with the digits installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.serving.routes.v2.inference_site import Site

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


@pytest.fixture(scope="module")
def site(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    state = tmp_path_factory.mktemp("site")
    exported.install(state / "models")
    site = Site(state)
    yield site
    site.close()
