"""The main thread of a process of the server: it answers HTTP until a signal comes."""

from __future__ import annotations

from collections.abc import Callable

from edge_sdk.systemd.notify import Notifier
from edge_sdk.systemd.watchdog import Check, Watchdog
from server.http_server import HttpServer
from server.stopping import Stopping


def answer_until_stopped(
    server: HttpServer,
    hangs: Check,
    stopping: Stopping,
    notifier: Notifier,
    started: Callable[[], None],
) -> None:
    """Answer HTTP until a signal comes, and tell the service manager that all parts work.

    Args:
        hangs: why the process does not do its work, as `Watchdog` asks.
        started: called once requests are taken.
    """
    with Watchdog(notifier) as watchdog:
        watchdog.add(hangs)
        watchdog.add(server.hangs)

        def stop() -> None:
            notifier.stopping()
            server.stop()

        stopping.on_stop(stop)
        server.run(started)
