"""Figures that the project wants to reach under faults, and the test that makes each of them.

A test has a short form, which `make test` runs, and a full one, which `make faults` runs: the
fixture `thorough` says which, and `reached(NAME, ...)` reports what came out. A test that has no
short form carries the marker `fault_figures`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure to reach.

    Attributes:
        rows: of the table in docs/faults.md.
        wanted: what is to be reached, as a sentence.
        tests: as pytest takes them; the last one reports the figure.
        minutes: about what it takes on two cores.
        loop_devices: whether it mounts file systems of its own, as root.
    """

    rows: tuple[int, ...]
    wanted: str
    tests: tuple[str, ...]
    minutes: float
    loop_devices: bool = False


def _test(file: str, name: str) -> str:
    """A test as pytest takes it."""
    return f"tests/{file}::{name}"


FIGURES: Final[Mapping[str, Figure]] = {
    "black-hole": Figure(
        (1,),
        "1,000 black-holed offloads are all answered: the first within the deadline + 0.25 s, the"
        " others within the local answer + 50 ms",
        (
            _test(
                "edge/test_agent_faults.py",
                "test_a_black_hole_costs_one_deadline_then_nothing_and_ends",
            ),
        ),
        1,
    ),
    "update-kill": Figure(
        (2,),
        "1,000 times kill -9 in download, verification, swap and commit: 0 corrupt, 0 without a"
        " bundle, first inference within 2 s of the restart",
        (
            _test(
                "edge/bundles/test_update_kill.py",
                "test_updates_killed_at_random_moments_always_leave_a_whole_bundle",
            ),
        ),
        10,
    ),
    "power-cut": Figure(
        (2,),
        "500 images of power cuts on a harsh mount: 0 corrupt; without fsync at least 90 %",
        (
            _test(
                "edge/bundles/test_power_cut.py",
                "test_images_of_a_power_cut_hold_a_whole_bundle",
            ),
        ),
        6,
        loop_devices=True,
    ),
    "power-cut-states": Figure(
        (2,),
        "of all that POSIX lets a power cut leave of an update and a roll back, 0 states without"
        " a bundle; without fsync every one",
        (
            _test(
                "edge/bundles/test_power_cut.py",
                "test_no_state_that_a_power_cut_may_leave_is_without_a_bundle",
            ),
        ),
        2,
    ),
    "broker-kill": Figure(
        (3, 4),
        "100 times kill -9 of broker and agent with the outbox: 0 of at least 15,000 queries lost,"
        " 0 applied twice",
        (
            _test(
                "edge/offload/test_outbox.py",
                "test_kills_of_agent_and_broker_lose_nothing_and_double_nothing",
            ),
        ),
        5,
    ),
    "memory": Figure(
        (11,),
        "an agent whose allocations fail answers again within 10 s, with a smaller prefix that the"
        " server gives it, and says so",
        (
            _test(
                "edge/bundles/test_out_of_memory.py",
                "test_the_server_gives_a_smaller_bundle_and_holds_the_depth",
            ),
        ),
        1,
    ),
    "isolation": Figure(
        (15,),
        "10,000 pairs of devices on each broker: only those of a device with itself pass",
        (
            _test(
                "serving/broker/test_isolation.py",
                "test_of_ten_thousand_pairs_only_those_of_a_device_with_itself_pass",
            ),
        ),
        2,
    ),
    "flipped-bytes": Figure(
        (18,),
        "every byte of every signed file flipped: 100 % refused",
        (
            _test(
                "edge/bundles/test_update_metadata.py",
                "test_every_flipped_byte_of_every_signed_file_is_refused",
            ),
        ),
        1,
    ),
    "registry-kill": Figure(
        (20,),
        "1,000 times kill -9 of a process that writes the registry: 0 committed rows lost",
        (_test("serving/registry/test_crash.py", "test_nothing_committed_is_lost_to_kill_9"),),
        4,
    ),
    "training-kill": Figure(
        (20,),
        "25 trainings with 7 kills each, of trainer and devices, come to their end",
        (
            _test(
                "training/fleet/test_kills.py",
                "test_training_ends_though_everybody_is_killed_in_the_middle",
            ),
            _test(
                "training/fleet/test_kills.py",
                "test_training_ends_wherever_its_processes_are_killed",
            ),
        ),
        20,
    ),
    "bystanders": Figure(
        (22,),
        "beside floods, a stuck subscriber and 1,000 silent sockets on the broker, HTTP and HTTPS:"
        " the others' p99 within 20 %, sockets closed within 10 s, memory bounded (64 MB)",
        (_test("serving/test_bystanders.py", "test_a_device_is_served_beside_attackers"),),
        3,
    ),
    "soak": Figure(
        (22,),
        "an hour of exits and offloads: less than 1 MB/h growth, no descriptor growth; ten minutes"
        " unless `--soak-minutes` says more",
        (_test("edge/test_soak.py", "test_memory_and_descriptors_stay_flat"),),
        11,
    ),
    "overload": Figure(
        (8,),
        "2 and 5 times the peak in an open loop: goodput at least 90 % of the peak, p99 of answers"
        " within the deadline, memory flat",
        (_test("serving/test_overload.py", "test_goodput_at_five_times_the_peak"),),
        4,
    ),
    "poisoned": Figure(
        (23,),
        "2 of 10 devices poison a training over HTTP, five seeds: at most 2 points lost, both"
        " named",
        (
            _test(
                "training/fleet/test_poisoned.py",
                "test_two_of_ten_that_send_poison_cost_at_most_two_points",
            ),
        ),
        25,
    ),
    "decoders": Figure(
        (26,),
        "100,000 generated frames, messages and manifests a run: 0 crashes, less than 20 MB growth",
        (
            _test(
                "serving/test_decoders.py",
                "test_no_damaged_bytes_crash_a_decoder_or_stay_in_memory",
            ),
        ),
        2,
    ),
    "silent-sockets-http": Figure(
        (22,),
        "1,100 silent or half-sent connections to HTTP and to HTTPS, against a limit of 1,024"
        " descriptors: the API answers within 1 s all the while, all are closed within 12 s, memory"
        " grows by less than 40 MB",
        (
            _test(
                "serving/listening/test_silent_peers.py",
                "test_more_silent_peers_than_descriptors_keep_nobody_out",
            ),
        ),
        1,
    ),
    "any-request": Figure(
        (26,),
        "requests that the API's description allows, and broken ones, to all its operations: 0"
        " answers with 5xx",
        (_test("serving/routes/test_any_request.py", "test_no_request_gets_a_5xx"),),
        10,
    ),
}
