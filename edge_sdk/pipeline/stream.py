"""Stream: source -> agent -> smoothing -> sinks, while the agent runs.

The source is read in one thread, the agent is asked in another, and each sink writes in its own.
Answers keep the order of the inputs, and offloads overlap (`EdgeAgent.predict_many`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from edge_sdk.answers.observer import AnswerObserver
from edge_sdk.answers.prediction import Prediction
from edge_sdk.errors import ConfigurationError, InputError, SplitedgeError
from edge_sdk.pipeline.answer import Row, row_of
from edge_sdk.pipeline.sinks.kinds import open_sink
from edge_sdk.pipeline.sinks.sink import Sink
from edge_sdk.pipeline.smoothing import Smoother, Smoothing
from edge_sdk.pipeline.sources.feed import EMPTY, Array, Feed, Item
from edge_sdk.pipeline.sources.kinds import Opened, Surroundings, open_source
from edge_sdk.settings_file.stream_table import StreamTable

if TYPE_CHECKING:
    from edge_sdk.agent import EdgeAgent

logger = logging.getLogger(__name__)

# Items that wait for the agent. A source that is faster waits in turn.
WAITING_MAX: Final = 8
# While offloads are under way, the agent is asked this often whether one is answered.
TICK_S: Final = 0.005
IDLE_S: Final = 0.2
# Time that the reading thread gets to end; one that a user's function holds is left behind.
READER_S: Final = 1.0


class Handover:
    """Items on their way from the reading to the asking thread.

    Args:
        newest: an item that waits is replaced by the next one, and counted.
    """

    def __init__(self, feed: Feed, *, newest: bool) -> None:
        self._feed = feed
        self._newest = newest
        self._items: deque[Item] = deque()
        self._state = threading.Condition()
        self._ended = False

    def put(self, item: Item) -> None:
        """Hand over an item; wait while there is no room, unless only the newest counts."""
        with self._state:
            if self._newest and self._items:
                self._items.clear()
                self._feed.counts.skipped += 1
            while not self._feed.stopped and len(self._items) >= WAITING_MAX:
                self._state.wait(IDLE_S)
            self._items.append(item)
            self._state.notify_all()

    def end(self) -> None:
        """No item follows."""
        with self._state:
            self._ended = True
            self._state.notify_all()

    @property
    def over(self) -> bool:
        """Whether all items were taken and none follows."""
        with self._state:
            return self._ended and not self._items

    def take(self, timeout_s: float) -> Item | None:
        """The next item; None without one in time."""
        with self._state:
            self._state.wait_for(lambda: bool(self._items) or self._ended, timeout_s)
            if not self._items:
                return None
            self._state.notify_all()
            return self._items.popleft()


class Stream:
    """Asks an agent about each input of a source, and gives the answers to sinks.

    Args:
        sinks: closed with the stream.
        smoothing: of the answers' labels; None for none.
        every_s: shortest time between two inputs; 0 takes them as they come.
        on_end: called once, when the source has ended and all is answered, or at a fault.
        on_row: called with each row in the asking thread, so it must not wait.
    """

    def __init__(
        self,
        agent: EdgeAgent,
        opened: Opened,
        sinks: Sequence[Sink],
        *,
        smoothing: Smoothing | None = None,
        every_s: float = 0.0,
        on_end: Callable[[], None] = lambda: None,
        on_row: Callable[[Row], None] = lambda _: None,
    ) -> None:
        self._agent = agent
        self._source = opened.source
        self._sinks = list(sinks)
        self._smoother = None if smoothing is None else Smoother(smoothing)
        self._every_s = every_s
        self._on_end = on_end
        self._on_row = on_row
        self._feed = Feed(opened.name, lambda: agent.manifest.input)
        self._handover = Handover(self._feed, newest=opened.source.newest)
        # asked and not answered; without their samples, of which a thousand can take a gigabyte
        self._given: deque[Item] = deque()
        self._answered = 0
        self._due = 0.0
        self._turned_at = time.monotonic()  # the thread that asks the agent
        self._fault: BaseException | None = None
        self._reader = threading.Thread(target=self._read, name="stream-source", daemon=True)
        self._asker = threading.Thread(target=self._ask, name="stream-agent", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._agent.add_observer(_Report(self.counts))
        self._reader.start()
        self._asker.start()

    def counts(self) -> dict[str, Any]:
        """Counts of the source, the answers and each sink, for people and telemetry."""
        return {
            "source": {
                "name": self._feed.name,
                "away": self._feed.why_away,
                **asdict(self._feed.counts),
            },
            "answered": self._answered,
            "sinks": [{"name": sink.name, **asdict(sink.counts)} for sink in self._sinks],
        }

    def hangs(self, limit_s: float) -> str:
        """Why the stream hangs; empty while it works, or waits for a source that is away.

        Args:
            limit_s: time that a thread may go without a sign of life.
        """
        now = time.monotonic()
        reads = self._reader.is_alive() and not self._source.patient
        if reads and now - self._feed.asked_at > limit_s:
            return f"{self._feed.name} has not come back for {now - self._feed.asked_at:.0f} s"
        # an answer of the server may be waited for
        limit_s += self._agent.deadline_s
        if self._asker.is_alive() and now - self._turned_at > limit_s:
            return f"the stream has asked for no answer for {now - self._turned_at:.0f} s"
        return ""

    def close(self) -> None:
        """Stop reading, answer what was read, and write what waits as far as the sinks take it."""
        self._feed.stop()
        if self._reader.ident is not None:
            self._reader.join(READER_S)
            self._handover.end()
            self._asker.join()
        for sink in self._sinks:
            sink.close()
        self._source.close()
        self._say_counts()

    def _say_counts(self) -> None:
        counts = self._feed.counts
        said = {"skipped": counts.refused, "holes": counts.holes, "frames passed": counts.skipped}
        said |= {f"dropped by {each.name}": each.counts.dropped for each in self._sinks}
        more = "".join(f", {count} {what}" for what, count in said.items() if count)
        logger.info("%s: %d answered%s", self._feed.name, self._answered, more)

    def check(self) -> None:
        """Raise the fault that ended the stream, if one did."""
        if self._fault is not None:
            raise self._fault

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        try:
            for item in self._source.items(self._feed):
                self._handover.put(item)
                if self._feed.stopped:
                    break
        except BaseException as err:  # noqa: BLE001 - the main thread raises it: see `check`
            self._fault = err
        finally:
            self._handover.end()

    def _ask(self) -> None:
        try:
            while not self._handover.over:
                self._ask_until_a_fault()
        except BaseException as err:  # noqa: BLE001 - the main thread raises it: see `check`
            self._fault = err
            self._feed.stop()
        self._on_end()

    def _ask_until_a_fault(self) -> None:
        try:
            for prediction in self._agent.predict_many(self._inputs()):
                self._take(self._given.popleft(), prediction)
        except SplitedgeError as err:
            # an update changed the model's input, or the memory is short: the stream goes on
            for item in self._given:
                self._feed.refuse(f"{item.name}: {err}")
            self._given.clear()

    def _inputs(self) -> Iterator[Array | None]:
        """The inputs as they come, and None while the agent may have answers ready."""
        while not self._handover.over:
            self._turned_at = time.monotonic()
            if any(sink.gone for sink in self._sinks):
                raise BrokenPipeError
            wait_s = self._wait_s()
            if wait_s > 0 and not self._feed.stopping.is_set():
                self._feed.stopping.wait(min(wait_s, TICK_S if self._given else IDLE_S))
                yield None
                continue
            item = self._handover.take(TICK_S if self._given else IDLE_S)
            if item is None:
                yield None
                continue
            self._due = time.monotonic() + self._every_s
            try:
                sample = item.take()
            except InputError as err:
                self._feed.refuse(str(err))
                continue
            self._feed.counts.read += 1
            self._given.append(replace(item, sample=EMPTY))
            yield sample

    def _wait_s(self) -> float:
        """Time until the next input may be taken; 0 for now."""
        if not all(sink.has_room(len(self._given)) for sink in self._sinks):
            return TICK_S
        return max(0.0, self._due - time.monotonic())

    def _take(self, item: Item, prediction: Prediction) -> None:
        self._turned_at = time.monotonic()
        self._answered += 1
        smoothed = None
        if self._smoother is not None:
            smoothed = self._smoother.next(prediction, self._agent.manifest.class_names)
        row = row_of(item.name, item.at, prediction, smoothed)
        self._on_row(row)
        for sink in self._sinks:
            sink.put(row)
        if item.mark is not None:
            self._source.answered(item.mark)


class _Report(AnswerObserver):
    """Puts the stream's counts into the agent's status, and an id into each answer."""

    name = "stream"

    def __init__(self, counts: Callable[[], Mapping[str, Any]]) -> None:
        self._counts = counts

    def report(self) -> Mapping[str, Any]:
        """The counts."""
        return self._counts()


def open_stream(
    agent: EdgeAgent,
    table: StreamTable,
    state: Path,
    *,
    source_base: Path,
    sink_base: Path,
    on_end: Callable[[], None] = lambda: None,
    on_row: Callable[[Row], None] = lambda _: None,
) -> Stream:
    """The stream that a table asks for, not yet started.

    Args:
        state: folder of the device, for what is remembered across restarts.
        source_base, sink_base: relative paths in the words of sources and sinks start there.
        on_end, on_row: of the stream.
    Raises: ConfigurationError naming the word and what is wrong with it.
    """
    if table.source is None:
        raise ConfigurationError("a sink or a smoothing needs a source; see --source")
    smoothing = None if table.smooth is None else Smoothing.parse(table.smooth)
    opened = open_source(table.source, Surroundings(source_base, state))
    sinks: list[Sink] = []
    try:
        for word in table.sinks or ("-",):
            sinks.append(open_sink(word, sink_base))  # noqa: PERF401 - those before are closed
    except BaseException:
        for sink in sinks:
            sink.close(0.0)
        raise
    return Stream(
        agent,
        opened,
        sinks,
        smoothing=smoothing,
        every_s=table.every,
        on_end=on_end,
        on_row=on_row,
    )
