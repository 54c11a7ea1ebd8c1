"""A server killed while it writes loses nothing that it reported as done.

A child enrols devices in a loop and says so after each commit; it is killed at random moments. The
short form of 15 kills runs here, and 1,000 in `make faults`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from server.registry.database import Registry

# Forks one writer for each line on stdin, so that imports are paid once; says the writer's id
# first, then a line for each enrolment that was committed.
FORK_SERVER = """
import os, sys
from server.registry.database import Registry

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        registry = Registry.open(sys.argv[1])
        print("ready", os.getpid(), flush=True)
        number = 0
        while True:
            number += 1
            device, _ = registry.redeem_token(registry.create_token(), line.strip(), {"n": number})
            registry.assign(device.id, number % 9, f"cnn/{number}/d1")
            # one write, so that a kill leaves all of the line or nothing
            os.write(1, f"done {device.id} {number}\\n".encode())
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


@pytest.mark.timeout(3600)  # of which the thousand kills of `make faults` need five minutes
def test_nothing_committed_is_lost_to_kill_9(
    registry_url: str, thorough: bool, reached: Callable[..., None]
) -> None:
    """FAULTS row 20: the server is killed before, in and after commits, on each database."""
    kills = 1_000 if thorough else 15
    url = registry_url
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    committed: dict[str, int] = {}
    fork_server = subprocess.Popen(
        [sys.executable, "-P", "-c", FORK_SERVER, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert fork_server.stdin is not None
    assert fork_server.stdout is not None
    for kill in range(kills):
        fork_server.stdin.write(f"k{kill}\n")
        fork_server.stdin.flush()
        _, writer = fork_server.stdout.readline().split()
        timer = threading.Timer(moments.uniform(0.0, 0.15), os.kill, (int(writer), 9))
        timer.start()
        while (line := fork_server.stdout.readline()) != "dead\n":
            if line.startswith("done"):
                _, device, number = line.split()
                committed[device] = int(number)
        timer.join()
        _check(url, committed, f"seed {seed}, kill {kill}")
    fork_server.stdin.close()
    fork_server.stdout.close()
    assert fork_server.wait() == 0
    assert committed
    reached(
        "registry-kill",
        f"{url.partition(':')[0]}: {kills:,} kills, 0 of {len(committed):,} committed rows lost",
        kills=kills,
        committed=len(committed),
    )


def _check(url: str, committed: dict[str, int], where: str) -> None:
    """The database opens, holds every committed enrolment, and no half of one."""
    registry = Registry.open(url)
    devices = {device.id: device for device in registry.devices()}
    used = [token.used_by for token in registry.tokens() if token.used_at is not None]
    registry.close()
    lost = committed.keys() - devices.keys()
    assert not lost, where
    for device, number in committed.items():
        assert devices[device].bundle == f"cnn/{number}/d1", where
    assert sorted(map(str, used)) == sorted(devices), where
