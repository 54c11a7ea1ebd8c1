"""A cluster of Ray: started on this machine or connected to, its actors and its tasks.

The only importer of ray. Everything that Ray would write by itself is kept in one temporary folder,
and everything that it would print is kept off the output; `--debug` shows it.

A cluster that is started here listens on loopback alone, with a token of its own: whoever may use a
cluster may run any code on it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from edge_sdk.errors import ConfigurationError
from server.errors import WorkerError

logger = logging.getLogger(__name__)

# short, because the path of a socket has at most 107 bytes and Ray adds 70
_PREFIX: Final = "se-ray-"
# Ray's name for "this machine alone": nodes then have the address 127.0.0.1
_LOOPBACK: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_LOOPBACK_HOSTS: Final = ("127.", "localhost:", "[::1]")
_TOKEN: Final = "RAY_AUTH_TOKEN"  # noqa: S105 - the name of the variable
_GIVEN_TOKENS: Final = (_TOKEN, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")

# What a call gives at once, in the place of its result; only this module looks inside.
Promise = Any
Actor = Any


class LostWorkerError(WorkerError):
    """The process of an actor or a task has ended before its result was there."""


class RayCluster:
    """A connection to a cluster; `connected` makes one."""

    def __init__(self) -> None:
        import ray  # noqa: PLC0415 - an extra, and a second to import

        self._ray = ray

    @property
    def address(self) -> str:
        """HOST:PORT, by which other programs of this machine connect."""
        found: str = self._ray.get_runtime_context().gcs_address
        return found

    @property
    def cpus(self) -> int:
        """Processors of all nodes, as the cluster counts them."""
        return int(self._ray.cluster_resources().get("CPU", 0))

    def start(self, kind: type[Any], *arguments: Any) -> Actor:
        """Start an actor of a class on one processor; its calls are carried out in their order."""
        return self._ray.remote(num_cpus=1)(kind).remote(*arguments)

    def call(self, actor: Actor, method: str, *arguments: Any) -> Promise:
        """Call a method of an actor."""
        return getattr(actor, method).remote(*arguments)

    def end(self, actor: Actor) -> None:
        """End an actor at once."""
        self._ray.kill(actor)

    def task(self, function: Callable[..., Any], *arguments: Any) -> Promise:
        """Run a function as a task on one processor; one that is lost is not run again by Ray."""
        return self._ray.remote(num_cpus=1, max_retries=0)(function).remote(*arguments)

    def cancel(self, promise: Promise) -> None:
        """End the process of a task at once."""
        self._ray.cancel(promise, force=True)

    def share(self, value: bytes) -> Promise:
        """Put a value into the store of objects, from which any number of calls may take it.

        It stays there, or on the disk where the store is full, as long as the promise is kept.
        """
        return self._ray.put(value)

    def first(self, promises: Sequence[Promise], timeout_s: float | None = None) -> Promise | None:
        """Wait for the first promise that is kept, or broken; None when the time is over."""
        ready, _ = self._ray.wait(list(promises), num_returns=1, timeout=timeout_s)
        return ready[0] if ready else None

    def result(self, promise: Promise) -> Any:
        """The result of a call or task; waits for it.

        Raises: LostWorkerError if its process has ended; WorkerError if it raised an error.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(promise)
        except errors.RayTaskError as err:
            raise WorkerError(f"{type(err.cause).__name__}: {err.cause}") from err
        except (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
            errors.TaskCancelledError,
        ) as err:
            logger.info("%s", err)
            raise LostWorkerError(type(err).__name__) from err
        except errors.RayError as err:
            raise WorkerError(f"Ray: {_first_line(err)}") from err


@contextlib.contextmanager
def connected(
    address: str | None = None, cpus: int | None = None, store_bytes: int | None = None
) -> Iterator[RayCluster]:
    """A cluster while the block runs: this program's, one by its address, or one that is started.

    A program that has called `ray.init` itself goes on with its own cluster, which is not ended.

    Args:
        address: HOST:PORT of a cluster of which this machine is a node; None starts one here, of
            processes that end with the block.
        cpus: processors of a cluster that is started; None for those that Ray counts.
        store_bytes: of its store of objects in shared memory; None for Ray's choice.
    Raises: ConfigurationError where there is no such cluster; ModuleNotFoundError without the extra
        `ray`.
    """
    if address is not None and "://" in address:
        raise ConfigurationError(
            f"--ray-address {address}: expected HOST:PORT of a cluster of which this machine is a"
            " node; start one here with `ray start --address=HOST:PORT`"
        )
    _prepare(local=address is None or address.startswith(_LOOPBACK_HOSTS))
    import ray  # noqa: PLC0415 - reads its variables when it is imported

    if ray.is_initialized():
        yield RayCluster()
        return
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        more: dict[str, Any] = {"address": address}
        if address is None:
            more = {
                "address": "local",
                "num_cpus": cpus,
                "object_store_memory": store_bytes,
                "include_dashboard": False,
                "_temp_dir": folder,
            }
            if not any(name in os.environ for name in _GIVEN_TOKENS):
                os.environ[_TOKEN] = secrets.token_hex(32)  # or Ray keeps one in the home folder
        _connect(ray, address, Path(folder), more)
        try:
            yield RayCluster()
        finally:
            ray.shutdown()


def _connect(ray: Any, address: str | None, empty: Path, more: dict[str, Any]) -> None:
    """Connect, quietly, and leave the program's signals and folder as they are."""
    debug = logging.getLogger().isEnabledFor(logging.DEBUG)
    logging.getLogger("ray").setLevel(logging.NOTSET if debug else logging.ERROR)
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        # workers search the current folder for modules first, where a user's own `server.py` lies
        with contextlib.chdir(empty):
            ray.init(configure_logging=False, log_to_driver=debug, **more)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as err:
        ray.shutdown()
        what = "a cluster on this machine" if address is None else f"--ray-address {address}"
        raise ConfigurationError(
            f"Ray: {what}: {_first_line(err)}; --debug shows what Ray says, and `ray status`"
            " whether a cluster runs"
        ) from err
    finally:
        if on_main:
            signal.signal(signal.SIGTERM, before)  # Ray puts its own there
    if not debug:
        _silence(ray)


def _prepare(*, local: bool) -> None:
    """Set what Ray reads from the environment, where the user has not.

    Args:
        local: whether the cluster is of this machine alone.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if local:
        for name, value in _LOOPBACK.items():
            os.environ.setdefault(name, value)


def _silence(ray: Any) -> None:
    """Keep Ray's messages about workers that died, which it prints unasked, off the output.

    There is no option for it (ray 2.60): we tell what matters ourselves.
    """
    inner = ray._private.worker  # noqa: SLF001 - see above
    inner.print_to_stdstream = lambda data, **_: logger.info("%s", "\n".join(data["lines"]))


def _first_line(err: Exception) -> str:
    """The first line of Ray's words, which fill half a page."""
    return next((line.strip() for line in str(err).splitlines() if line.strip()), repr(err))
