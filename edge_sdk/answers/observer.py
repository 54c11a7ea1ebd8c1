"""Observers of an agent's answers: statistics, prices, learning, and inputs that are kept.

An agent without observers pays nothing for them. With observers, every answer has an id, and the
user can correct it by that id: `EdgeAgent.correct`.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import orjson

from edge_sdk.answers.prediction import Prediction
from edge_sdk.gate.gate import Decision
from edge_sdk.manifest import BundleManifest
from edge_sdk.session import Array
from edge_sdk.wire.messages import new_id

logger = logging.getLogger(__name__)

# Answers that can still be corrected: the newest within both limits.
REMEMBERED_MAX: Final = 512
REMEMBERED_BYTES: Final = 8_000_000

Part = Literal["x", "z"]


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer, as observers see it.

    Attributes:
        prediction: what the caller gets; `prediction.id` names the answer.
        decision: of the gate, with the exit head's own label and probabilities.
        manifest: of the bundle that answered.
        x: raw input, without a batch axis. If an observer remembers `x`, it is a copy that nobody
            changes; else it is the caller's, for the time of the call `answered` alone, and None in
            `corrected`.
        z: (1, ...), the prefix's output, which nobody changes; None if the exit graph does not
            compute it, and in `corrected` if no observer remembers `z`.
    """

    prediction: Prediction
    decision: Decision
    manifest: BundleManifest
    x: Array | None
    z: Array | None


class AnswerObserver:
    """Base of observers; each method is neutral unless it is overridden.

    The agent calls `answered`, `corrected` and `report` of its observers one at a time. An observer
    that raises is logged once and not called again: no observer can break `predict`.

    Attributes:
        name: key of its report in the agent's status.
        remembers: parts of an answer that `corrected` needs. If it is empty, `corrected` is not
            called.
    """

    name: str = "observer"
    remembers: frozenset[Part] = frozenset()

    def answered(self, answered: Answered) -> None:
        """Take note of an answer, in the thread of `predict`, before the caller has it.

        Longer work belongs in a thread of the observer: each microsecond here is one more for the
        caller. It must not call the agent.
        """

    def corrected(self, answered: Answered, label: int) -> None:
        """Take note of the user's label for an answer, in the thread of `EdgeAgent.correct`."""

    def report(self) -> Mapping[str, Any] | None:
        """State for people and telemetry, as JSON takes it; None adds nothing to the status."""
        return None

    def close(self) -> None:
        """End its work; no answer follows."""


class Observers:
    """The observers of one agent, and the answers that can still be corrected.

    Any thread may call any method.
    """

    def __init__(self, observers: Iterable[AnswerObserver]) -> None:
        self._observers = list(observers)
        self._failed: list[AnswerObserver] = []
        self._parts = _parts(self._observers)
        self._recent = RecentAnswers()
        self._lock = threading.Lock()
        # 8 random bytes and a number: unique too, at a third of the cost of 16 random bytes
        self._prefix = new_id()[:16]
        self._numbers = itertools.count()

    @property
    def correctable(self) -> bool:
        """Whether an observer takes corrections."""
        return bool(self._parts)

    def add(self, observer: AnswerObserver) -> None:
        """Tell one more observer, from the next answer on."""
        with self._lock:
            self._observers.append(observer)
            self._parts = _parts(self._observers)

    def new_id(self) -> str:
        """Id of an answer without a query, in the form of a query's id."""
        return f"{self._prefix}{next(self._numbers):016x}"

    def answered(self, answered: Answered, *, owned: bool = False) -> None:
        """Tell every observer of an answer.

        Args:
            owned: whether `answered.x` is a copy already.
        """
        with self._lock:
            parts = self._parts
            if parts:
                if "x" in parts and not owned and answered.x is not None:
                    answered = replace(answered, x=answered.x.copy())
                self._recent.add(answered, parts)
            self._tell(lambda observer: observer.answered(answered))

    def correct(self, identifier: str, label: int) -> bool:
        """Tell the observers that take corrections.

        Returns: whether the answer was still remembered. Each is corrected once.
        """
        with self._lock:
            answered = self._recent.pop(identifier)
            if answered is None:
                return False
            self._tell(lambda each: each.corrected(answered, label) if each.remembers else None)
            return True

    def reports(self) -> dict[str, Mapping[str, Any]]:
        """The observers' reports, by name."""
        found: dict[str, Mapping[str, Any]] = {}

        def ask(observer: AnswerObserver) -> None:
            report = observer.report()
            if report is not None:
                orjson.dumps(report)  # raises: neither a heartbeat nor a status may fail for it
                found[observer.name] = report

        with self._lock:
            self._tell(ask)
        return found

    def close(self) -> None:
        """Close every observer. They are told of no further answer."""
        with self._lock:
            observers = [*self._observers, *self._failed]
            self._observers, self._failed = [], []
            self._parts = frozenset()
        # without the lock: the observer's thread, which its `close` may wait for, may need it
        for observer in observers:
            _try(observer, lambda each: each.close())

    def _tell(self, call: Callable[[AnswerObserver], None]) -> None:
        failed = [observer for observer in self._observers if not _try(observer, call)]
        if failed:
            self._failed += failed
            self._observers = [each for each in self._observers if each not in failed]
            self._parts = _parts(self._observers)


class RecentAnswers:
    """The newest answers by id, at most REMEMBERED_MAX and REMEMBERED_BYTES of inputs and z."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Answered, int]] = OrderedDict()
        self._size_bytes = 0

    def add(self, answered: Answered, parts: frozenset[Part]) -> None:
        """Remember these parts of an answer, and forget the oldest beyond the limits."""
        x = answered.x if "x" in parts else None
        z = answered.z if "z" in parts else None
        size_bytes = sum(part.nbytes for part in (x, z) if part is not None)
        self._kept[answered.prediction.id] = replace(answered, x=x, z=z), size_bytes
        self._size_bytes += size_bytes
        while len(self._kept) > REMEMBERED_MAX or self._size_bytes > REMEMBERED_BYTES:
            self._size_bytes -= self._kept.popitem(last=False)[1][1]

    def pop(self, identifier: str) -> Answered | None:
        """The answer with that id, which is then forgotten; None if it is not known any more."""
        kept = self._kept.pop(identifier, None)
        if kept is None:
            return None
        self._size_bytes -= kept[1]
        return kept[0]


def _parts(observers: Iterable[AnswerObserver]) -> frozenset[Part]:
    return frozenset().union(*(observer.remembers for observer in observers))


def _try(observer: AnswerObserver, call: Callable[[AnswerObserver], None]) -> bool:
    """Whether the call of an observer did not raise; a fault is logged."""
    try:
        call(observer)
    except Exception:  # observers may be the user's, and predictions go on without them
        logger.exception("observer=%s failed; it is not called again", observer.name)
        return False
    return True
