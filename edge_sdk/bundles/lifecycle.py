"""The life of a device's bundle: load it, watch its health, update it, switch, roll back.

A bundle counts as healthy once it ran for HEALTH_S, or once it answered a query and the agent
closed. A bundle that does not load gives way to the one before it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from edge_sdk.bundles.personal_weights import PersonalWeights
from edge_sdk.bundles.run_update import run_update
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.bundles.store import ActiveBundle, BundleStore
from edge_sdk.errors import (
    BundleError,
    ConfigurationError,
    InputError,
    LinkError,
    NoBundleError,
    SplitedgeError,
    StorageError,
    UpdateRefusedError,
)
from edge_sdk.settings import AgentSettings

logger = logging.getLogger(__name__)

HEALTH_S: Final = 10.0


def update(state: Path) -> None:
    """Fetch the bundle that is assigned to this device, in a short-lived process, and activate it.

    A running agent keeps its bundle until its next `refresh`.

    Raises: UpdateRefusedError, StorageError or LinkError with the reason; the old bundle stays.
    """
    outcome = run_update(state)
    if outcome.status in ("installed", "unchanged"):
        return
    kinds = {"unreachable": LinkError, "no_space": StorageError}
    raise kinds.get(outcome.status, UpdateRefusedError)(f"update: {outcome.reason}")


@dataclass(slots=True)
class FixedBundle:
    """A bundle without a state folder: it is never updated and never rolled back."""

    runner: BundleRunner

    def refresh(self) -> None:
        """Keep the bundle."""

    def request_update(self) -> None:
        """Keep the bundle."""

    def close(self, *, answered: bool) -> None:
        """Note nothing."""


class BundleLifecycle:
    """The active bundle of a state folder.

    Attributes:
        runner: the bundle that answers now; replaced between two predictions.
    """

    def __init__(self, store: BundleStore, settings: AgentSettings, runner: BundleRunner) -> None:
        self.runner = runner
        self._store = store
        self._settings = settings
        self._updating = threading.Lock()
        self._update_wanted = threading.Event()
        self._health: threading.Timer | None = None
        self._closed = False

    @classmethod
    def start(cls, state: Path, settings: AgentSettings) -> Self:
        """Count a start of the active bundle, and load it; fetch a bundle first if there is none.

        Call `watch_health` once the agent runs, or `forget_start` if the agent cannot start for
        another reason.

        Raises: NoBundleError, BundleError, ConfigurationError; the reason of `update`.
        """
        store = BundleStore(state)
        try:
            store.count_start()
        except StorageError as err:  # a bundle runs from a read-only disk too
            logger.warning("the start was not counted: %s", err)
        try:
            return cls(store, settings, _load(store, settings))
        except SplitedgeError:
            _forget_start(store)
            raise

    def forget_start(self) -> None:
        """Take back the counted start: it ended with an error that says why, not with a crash."""
        _forget_start(self._store)

    def watch_health(self) -> None:
        """Confirm the bundle after HEALTH_S."""
        if self._health is not None:
            self._health.cancel()
        self._health = threading.Timer(HEALTH_S, self._confirm)
        self._health.daemon = True
        self._health.start()

    def refresh(self) -> None:
        """Fetch the assigned bundle and switch to it.

        Raises: SplitedgeError with the reason if it was refused; the old bundle goes on.
        """
        with self._updating:
            self._update_wanted.clear()
            try:
                update(self._store.state)
            finally:
                self._switch_bundle()

    def request_update(self) -> None:
        """Refresh in the background; a request while another one waits adds nothing."""
        # one runs and one waits: the one that waits also finds what was requested in between
        if not self._update_wanted.is_set():
            self._update_wanted.set()
            threading.Thread(target=self._refresh_or_warn, daemon=True).start()

    def close(self, *, answered: bool) -> None:
        """Stop watching, and settle the start that is not confirmed yet.

        Args:
            answered: whether the bundle made a prediction, which confirms it.
        """
        self._closed = True
        if self._health is None:
            return
        early = self._health.is_alive()
        self._health.cancel()
        self._health.join()
        if early and answered:
            self._confirm()
        elif early:
            _forget_start(self._store)

    def _switch_bundle(self) -> None:
        """Run the bundle that is active now, or roll back if it does not load here.

        Raises: UpdateRefusedError saying why it does not load.
        """
        active = self._store.active()
        if active.manifest == self.runner.manifest or self._closed:
            return
        try:
            runner = _runner(active, self._settings, self._load_personal())
        except (BundleError, InputError) as err:
            self._store.roll_back(str(err))
            raise UpdateRefusedError(f"{active.manifest.bundle}: {err}") from err
        self.runner = runner
        self.watch_health()
        logger.info("bundle=%s is active", active.manifest.bundle)

    def _load_personal(self) -> PersonalWeights | None:
        """The personal weights as the last training left them; None if they cannot be read."""
        if self._settings.personal is None:
            return None
        try:
            return PersonalWeights.load(self._store.state, self._settings.personal)
        except ConfigurationError as err:
            logger.warning("%s", err)
            return None

    def _refresh_or_warn(self) -> None:
        if self._closed:
            return
        try:
            self.refresh()
        except SplitedgeError as err:
            logger.warning("update: %s", err)

    def _confirm(self) -> None:
        try:
            self._store.confirm()
        except SplitedgeError as err:
            logger.warning("the bundle's health was not saved: %s", err)


def _load(store: BundleStore, settings: AgentSettings) -> BundleRunner:
    """The active bundle, fetched if there is none; the one before it if it does not load."""
    try:
        active = store.active()
    except NoBundleError:
        update(store.state)
        active = store.active()
    name = settings.personal
    personal = None if name is None else PersonalWeights.load(store.state, name)
    try:
        return _runner(active, settings, personal)
    except BundleError as err:
        # without another bundle it stays: another version of onnxruntime may load it
        if not store.has_way_back():
            raise
        logger.warning("bundle=%s does not load: %s", active.manifest.bundle, err)
        return _runner(store.roll_back(str(err)), settings, personal)


def _runner(
    active: ActiveBundle, settings: AgentSettings, personal: PersonalWeights | None
) -> BundleRunner:
    """The bundle's runner, without personal weights that do not fit.

    The server may assign any bundle at any time, and the device must answer all the same.
    """
    try:
        return BundleRunner(active.folder, active.manifest, settings, personal)
    except ConfigurationError as err:
        if personal is None:
            raise
        logger.warning("bundle=%s runs without personal weights: %s", active.manifest.bundle, err)
        return BundleRunner(active.folder, active.manifest, settings)


def _forget_start(store: BundleStore) -> None:
    try:
        store.forget_start()
    except StorageError as err:
        logger.warning("the start is still counted: %s", err)
