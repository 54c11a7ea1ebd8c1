"""An agent that leaves a bundle for want of memory, beside updates under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edge_sdk.bundles import lifecycle
from edge_sdk.bundles.lifecycle import BundleLifecycle
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.bundles.update import update
from edge_sdk.errors import OutOfMemoryError
from edge_sdk.settings import AgentSettings

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot, Export

WITHIN_S = 60.0
SHORT = OutOfMemoryError("no memory for the features")


@pytest.fixture
def running(installed: Path) -> Iterator[BundleLifecycle]:
    """The life of a device's bundle, tiny/1/d2; the server has tiny/2/d2 too."""
    made = BundleLifecycle.start(installed, AgentSettings())
    yield made
    made.close(answered=False)


@contextmanager
def held_download(depot: Depot) -> Iterator[threading.Event]:
    """The next download does not end within the block; its event says that it has begun."""
    fetching, over = threading.Event(), threading.Event()

    def hold() -> None:
        depot.faults.before_target = None  # the next ones come at once
        fetching.set()
        over.wait(2 * WITHIN_S)

    depot.faults.before_target = hold
    try:
        yield fetching
    finally:
        over.set()


@pytest.mark.deadline
def test_a_smaller_bundle_is_not_fetched_behind_a_slow_one(
    running: BundleLifecycle, depot: Depot, export: Export
) -> None:
    depot.repository.publish_bundles(export.write(3))
    depot.assigned, depot.smaller = "tiny/2/d2", "tiny/3/d2"
    with held_download(depot) as fetching:
        running.request_update()
        assert fetching.wait(WITHIN_S)
        found = running.leave(running.runner, SHORT, WITHIN_S)
    assert found.manifest.bundle == "tiny/3/d2"
    assert running.trouble.startswith("tiny/1/d2 ran out of memory")


@pytest.mark.deadline
def test_a_smaller_bundle_does_not_wait_for_a_measurement(
    running: BundleLifecycle, depot: Depot, export: Export
) -> None:
    """FAULTS row 11."""
    depot.repository.publish_bundles(export.write(3))
    depot.smaller = "tiny/3/d2"
    with held_download(depot) as fetching, ThreadPoolExecutor() as pool:
        measured = pool.submit(running.measure, ["tiny/2/d2"])
        assert fetching.wait(WITHIN_S)
        found = running.leave(running.runner, SHORT, WITHIN_S)
        assert measured.result(WITHIN_S).status == "stopped"
    assert found.manifest.bundle == "tiny/3/d2"


def test_two_threads_that_switch_load_the_new_bundle_once(
    running: BundleLifecycle, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, twice, loaded = threading.Event(), threading.Event(), []
    load = lifecycle._runner

    def slowly(*arguments: Any) -> BundleRunner:
        loaded.append(arguments)
        loading.set()
        if len(loaded) == 2:
            twice.set()
        twice.wait(1.0)  # time for the other thread to come here too
        return load(*arguments)

    first = running.runner
    assert update(installed, "tiny/2/d2").status == "installed"
    monkeypatch.setattr(lifecycle, "_runner", slowly)
    refreshing = threading.Thread(target=running._switch_bundle)
    refreshing.start()
    assert loading.wait(20)
    # a prediction runs out of memory while the new bundle is loaded: twice would take more of it
    leaving = threading.Thread(target=running._leave, args=(first, "no memory"))
    leaving.start()
    refreshing.join(20)
    leaving.join(20)
    assert running.runner.manifest.bundle == "tiny/2/d2"
    assert len(loaded) == 1
