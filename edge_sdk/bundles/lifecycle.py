"""The life of a device's bundle: load it, watch its health, update it, switch, roll back.

A bundle counts as healthy once it ran for HEALTH_S, or once it answered a query and the agent
closed. A bundle that does not load gives way to the one before it.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from edge_sdk.bundles.memory_failures import HOLD_S, has_smaller, tell_failure
from edge_sdk.bundles.personal_weights import PersonalWeights
from edge_sdk.bundles.run_update import Begun, UpdateOutcome, run_measure, run_update
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.bundles.store import ActiveBundle, BundleStore
from edge_sdk.errors import (
    BundleError,
    ConfigurationError,
    InputError,
    LinkError,
    NoBundleError,
    OutOfMemoryError,
    SplitedgeError,
    StorageError,
    TrialTimeoutError,
    UpdateRefusedError,
    WrongAnswersError,
)
from edge_sdk.providers.choice import AGAIN_S, KeptTrials, ProviderTrial, choose_provider
from edge_sdk.providers.names import CPU
from edge_sdk.session import available_providers, onnxruntime_version
from edge_sdk.settings import AgentSettings

logger = logging.getLogger(__name__)

HEALTH_S: Final = 10.0
# no smaller bundle was found: ask again after this long
LEAVE_AGAIN_S: Final = 10.0


def update(state: Path, begun: Begun | None = None) -> None:
    """Fetch the bundle that is assigned to this device, in a short-lived process, and activate it.

    A running agent keeps its bundle until its next `refresh`.

    Args:
        begun: as in `run_update`.
    Raises: UpdateRefusedError, StorageError or LinkError with the reason; the old bundle stays.
    """
    outcome = run_update(state, begun=begun)
    if outcome.status in ("installed", "unchanged"):
        return
    kinds = {"unreachable": LinkError, "no_space": StorageError}
    raise kinds.get(outcome.status, UpdateRefusedError)(f"update: {outcome.reason}")


@dataclass(slots=True)
class FixedBundle:
    """A bundle without a state folder: it is never updated and never rolled back."""

    runner: BundleRunner
    digest: str = ""
    trouble: str = ""

    def refresh(self) -> None:
        """Keep the bundle."""

    def request_update(self) -> None:
        """Keep the bundle."""

    def measure(self, _bundles: Sequence[str]) -> UpdateOutcome:
        """Measure nothing: there is no other bundle."""
        return UpdateOutcome("unchanged", None)

    def leave(self, _runner: BundleRunner, error: MemoryError, _wait_s: float) -> BundleRunner:
        """Raise OutOfMemoryError: there is no other bundle."""
        raise _out_of_memory(error) from error

    def close(self, *, answered: bool) -> None:
        """Note nothing."""


class BundleLifecycle:
    """The active bundle of a state folder.

    Attributes:
        runner: the bundle that answers now; replaced between two predictions.
        digest: of its content.
        trouble: the last failure for want of memory, and when, for people; empty if there was none.
        on_switch: called after each switch to another bundle, in the thread of the update.
    """

    def __init__(
        self, store: BundleStore, settings: AgentSettings, runner: BundleRunner, digest: str
    ) -> None:
        self.runner = runner
        self.on_switch: Callable[[], None] | None = None
        self.digest = digest
        self._store = store
        self._settings = settings
        self.trouble = ""
        self._updating = threading.Lock()
        self._updater: subprocess.Popen[bytes] | None = None
        self._measurer: subprocess.Popen[bytes] | None = None
        self._switching = threading.Lock()
        self._leaving = threading.Lock()
        self._leave_again_at = 0.0
        self._switched = threading.Condition()
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
            return cls(store, settings, *_load(store, settings))
        except SplitedgeError:
            _forget_start(store)
            raise

    def forget_start(self) -> None:
        """Take back the counted start: it ended with an error that says why, not with a crash."""
        _forget_start(self._store)

    def watch_health(self) -> None:
        """Confirm the bundle that runs, after HEALTH_S."""
        if self._health is not None:
            self._health.cancel()
        health = threading.Timer(HEALTH_S, self._confirm, (self.digest,))
        health.daemon = True
        health.start()
        self._health = health  # started: `close`, in another thread, waits for its end

    def refresh(self) -> None:
        """Fetch the assigned bundle and switch to it.

        Raises: SplitedgeError with the reason if it was refused; the old bundle goes on.
        """
        with self._updating:
            self._update_wanted.clear()
            try:
                self._update()
            finally:
                self._switch_bundle()

    def request_update(self) -> None:
        """Refresh in the background; a request while another one waits adds nothing."""
        # one runs and one waits: the one that waits also finds what was requested in between
        if not self._update_wanted.is_set():
            self._update_wanted.set()
            threading.Thread(target=self._refresh_or_warn, daemon=True).start()

    def measure(self, bundles: Sequence[str]) -> UpdateOutcome:
        """Measure bundles that do not run here; it ends early where a smaller one is needed."""

        def begun(process: subprocess.Popen[bytes]) -> None:
            self._measurer = process
            if self._leaving.locked():  # it looked for a measurement before there was one
                process.terminate()

        try:
            return run_measure(self._store.state, bundles, begun=begun)
        finally:
            self._measurer = None

    def leave(self, runner: BundleRunner, error: MemoryError, wait_s: float) -> BundleRunner:
        """Leave a bundle that ran out of memory for a smaller one, in the background.

        Args:
            runner: that ran out of memory.
            wait_s: how long to wait for the smaller one.
        Returns: the runner in its place.
        Raises: OutOfMemoryError if there is none within that time; it may still come.
        """
        if self.runner is runner and not self._leaving.locked():
            arguments = (runner, str(_out_of_memory(error)))
            try:
                threading.Thread(target=self._leave, args=arguments, daemon=True).start()
            except RuntimeError as err:  # no memory for a thread either: the next failure tries it
                logger.warning("bundle=%s stays for now: %s", runner.manifest.bundle, err)
        with self._switched:
            if self._switched.wait_for(lambda: self.runner is not runner, max(wait_s, 0.0)):
                return self.runner
        raise _out_of_memory(error) from error

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
            self._confirm(self.digest)
        elif early:
            _forget_start(self._store)

    def _update(self) -> None:
        """Fetch the assigned bundle; call it with `_updating`."""

        def begun(process: subprocess.Popen[bytes]) -> None:
            self._updater = process

        try:
            update(self._store.state, begun)
        finally:
            self._updater = None

    def _switch_bundle(self) -> None:
        """Run the bundle that is active now, or roll back if it does not load here.

        Any thread may call it: the last one to load a bundle has seen the store last.

        Raises: UpdateRefusedError saying why it does not load.
        """
        with self._switching:
            self._switch()

    def _switch(self) -> None:
        active = self._store.active()
        if active.manifest == self.runner.manifest or self._closed:
            return
        try:
            runner = _runner(active, self._settings, self._load_personal(), self._store.state)
        except OutOfMemoryError as err:
            self._note_trouble(active.manifest.bundle, str(err))
            # the one before it may be the one that is left for it: then this is tried again
            if self._store.has_way_back():
                self._store.roll_back(str(err), hold_s=HOLD_S, digest=active.digest)
            tell_failure(self._store.state, active.manifest.bundle, str(err))
            raise UpdateRefusedError(f"{active.manifest.bundle}: {err}") from err
        except (BundleError, InputError) as err:
            self._store.roll_back(str(err), digest=active.digest)
            raise UpdateRefusedError(f"{active.manifest.bundle}: {err}") from err
        with self._switched:
            self.runner, self.digest = runner, active.digest
            self._leave_again_at = 0.0
            self._switched.notify_all()
        self.watch_health()
        logger.info("bundle=%s is active", active.manifest.bundle)
        if self.on_switch is not None:
            self.on_switch()

    def _leave(self, runner: BundleRunner, why: str) -> None:
        """Put a smaller bundle in the place of `runner`, which ran out of memory."""
        bundle = runner.manifest.bundle
        if not self._leaving.acquire(blocking=False):
            return  # another prediction's failure has begun it
        try:
            now = time.monotonic()
            if self._closed or self.runner is not runner or now < self._leave_again_at:
                return
            self._leave_again_at = now + LEAVE_AGAIN_S
            self._note_trouble(bundle, why)
            self._leave_for_smaller(bundle, why)
        except SplitedgeError as err:
            logger.warning("bundle=%s stays, for want of a smaller one: %s", bundle, err)
        finally:
            self._leaving.release()

    def _leave_for_smaller(self, bundle: str, why: str) -> None:
        measurer = self._measurer
        if measurer is not None:  # it takes memory too, and an update would find it under way
            measurer.terminate()
        active = self._store.active()
        if active.manifest.bundle != bundle:  # installed, and not loaded yet
            self._switch_bundle()
            return
        if has_smaller(self._store, active):
            self._store.roll_back(why, hold_s=HOLD_S, digest=active.digest)
            self._switch_bundle()
            tell_failure(self._store.state, bundle, why)
            return
        # what is being fetched now was assigned before the server knew
        before = self._updater
        # the server assigns a smaller one, once it knows; one that does not know assigns the same
        if not tell_failure(self._store.state, bundle, why):
            raise NoBundleError("the server does not know of it")
        if before is not None:
            before.terminate()
        with self._updating:
            if measurer is not None:
                measurer.wait()
            self._update()
            self._switch_bundle()
        if self._store.active().digest == active.digest:
            raise NoBundleError("the server has no smaller one")

    def _note_trouble(self, bundle: str, why: str) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self.trouble = f"{bundle} ran out of memory at {at}: {why}"
        logger.warning("bundle=%s ran out of memory: %s", bundle, why)

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

    def _confirm(self, digest: str) -> None:
        try:
            self._store.confirm(digest)
        except SplitedgeError as err:
            logger.warning("the bundle's health was not saved: %s", err)


def _load(store: BundleStore, settings: AgentSettings) -> tuple[BundleRunner, str]:
    """Runner and digest of the active bundle, fetched if there is none.

    A bundle that does not load gives way to the one before it.
    """
    try:
        active = store.active()
    except NoBundleError:
        update(store.state)
        try:
            active = store.active()
        except NoBundleError as err:
            raise NoBundleError(
                f"{err}; if the server has no model yet, this device can take part in the training"
                " of one: `splitedge agent run --train DATA`"
            ) from err
    name = settings.personal
    personal = None if name is None else PersonalWeights.load(store.state, name)
    try:
        return _runner(active, settings, personal, store.state), active.digest
    except OutOfMemoryError as err:
        other = _smaller(store, active, str(err))
    except BundleError as err:
        # without another bundle it stays: another version of onnxruntime may load it
        if not store.has_way_back():
            raise
        logger.warning("bundle=%s does not load: %s", active.manifest.bundle, err)
        other = store.roll_back(str(err))
    return _runner(other, settings, personal, store.state), other.digest


def _out_of_memory(error: MemoryError) -> OutOfMemoryError:
    """The error as ours; numpy and Python raise their own."""
    if isinstance(error, OutOfMemoryError):
        return error
    return OutOfMemoryError(str(error) or "out of memory")


def _smaller(store: BundleStore, active: ActiveBundle, why: str) -> ActiveBundle:
    """A smaller bundle in the place of one that has no memory to load: at hand, or the server's.

    Raises: OutOfMemoryError if there is none.
    """
    bundle = active.manifest.bundle
    logger.warning("bundle=%s ran out of memory: %s", bundle, why)
    told = tell_failure(store.state, bundle, why)
    if has_smaller(store, active):
        return store.roll_back(why, hold_s=HOLD_S)
    try:
        if told:
            update(store.state)
    except SplitedgeError as err:
        logger.warning("update: %s", err)
    found = store.active()
    if found.digest == active.digest:
        raise OutOfMemoryError(f"{bundle}: {why}; free some memory, or pin this device to less")
    return found


def _runner(
    active: ActiveBundle, settings: AgentSettings, personal: PersonalWeights | None, state: Path
) -> BundleRunner:
    """The bundle's runner, without personal weights that do not fit.

    The server may assign any bundle at any time, and the device must answer all the same.
    """
    provider = _provider(active, settings, state)
    try:
        return BundleRunner(active.folder, active.manifest, settings, personal, provider)
    except ConfigurationError as err:
        if personal is None:
            raise
        logger.warning("bundle=%s runs without personal weights: %s", active.manifest.bundle, err)
        return BundleRunner(active.folder, active.manifest, settings, provider=provider)
    except OutOfMemoryError:
        raise
    except BundleError as err:
        if provider == CPU:
            raise
        logger.warning("provider %s, which passed its trial: %s; the CPU answers", provider, err)
        return BundleRunner(active.folder, active.manifest, settings, personal, CPU)


def _forget_start(store: BundleStore) -> None:
    try:
        store.forget_start()
    except StorageError as err:
        logger.warning("the start is still counted: %s", err)


def _provider(active: ActiveBundle, settings: AgentSettings, state: Path) -> str:
    """The execution provider of a bundle.

    Raises: ConfigurationError if the settings ask for one that is not in this onnxruntime.
    """

    def attempt(name: str) -> ProviderTrial:
        from edge_sdk.bundles.trial import run_trial  # noqa: PLC0415 - few have a second provider

        try:
            report = run_trial(active.folder, provider=name)
        except TrialTimeoutError as err:
            return ProviderTrial(None, str(err), again_at=time.time() + AGAIN_S)
        except (UpdateRefusedError, OutOfMemoryError, StorageError) as err:
            return ProviderTrial(None, str(err), lasting=isinstance(err, WrongAnswersError))
        return ProviderTrial(report.measurement.latency_ms, overrides=report.overrides)

    asked = settings.provider
    trials = KeptTrials(state, active.digest, onnxruntime_version(), attempt, asked=asked)
    replaces = settings.personal is not None or settings.learn is not None
    return choose_provider(settings.provider, available_providers(), trials.of, overrides=replaces)
