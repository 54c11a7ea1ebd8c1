"""Methods at the strength at which they are another, and seams that are neutral."""

from __future__ import annotations

from edge_sdk.training.protocol.messages import (
    EndRound,
    Reply,
    Request,
    Update,
    Weights,
)
from server.training.methods.fedavg import fedavg, fedprox
from server.training.methods.splitfed import (
    multi_exit,
    splitfed_v1,
    splitgp,
)
from server.training.methods.supersfl import supersfl
from server.training.rounds.loop import RoundLoop
from server.training.rounds.transport import LocalTransport
from tests.training.worlds import (
    Meddler,
    World,
    assert_same,
    differences,
    meddling,
)


def test_fedprox_without_a_pull_is_fedavg() -> None:
    assert_same(World(fedprox(0.0)).trained(), World(fedavg()).trained())
    assert differences(World(fedprox(0.5)).trained(), World(fedavg()).trained())


def test_splitgp_without_a_personal_share_is_multi_exit() -> None:
    assert_same(World(splitgp(0.0)).trained(), World(multi_exit()).trained())
    assert differences(World(splitgp(0.2)).trained(), World(multi_exit()).trained())


def test_multi_exit_without_an_exit_share_is_splitfed() -> None:
    assert_same(World(multi_exit(0.0)).trained(), World(splitfed_v1()).trained())
    heads = {"exit1", "exit2", "exit3", "exit4"}
    trained = World(multi_exit())
    changed = {name.partition(".")[0] for name in differences(trained.trained(), trained.before)}
    assert heads <= changed


def test_supersfl_without_a_vote_of_the_servers_and_one_client_takes_its_stages_as_they_are() -> (
    None
):
    kept: dict[str, Update] = {}

    def keep(name: str, _request: Request, reply: Reply) -> Reply:
        if isinstance(reply, Update):
            kept[name] = reply
        return reply

    world = World(
        supersfl(server_weight=0.0),
        "a",
        transport=meddling(keep),
    )
    after = world.trained(1)
    held = {k: v for k, v in kept["a"].weights.items() if not k.startswith("exit")}
    assert_same({name: after[name] for name in held}, held)


def test_exit_heads_of_supersfl_stay_on_their_clients() -> None:
    world = World(supersfl())
    assert not [name for name in differences(world.trained(), world.before) if "exit" in name]
    heads = {next(iter(c.personal)).partition(".")[0] for c in world.clients.values()}
    assert heads == {"exit1", "exit2", "exit3", "exit4"}


def test_a_stage_that_no_client_holds_keeps_the_servers_training() -> None:
    stepped: list[Weights] = []
    world = World(supersfl(), "ab")

    def look(_name: str, request: Request, reply: Reply) -> Reply:
        if isinstance(request, EndRound):
            stepped.append(world.state.read())
        return reply

    world.loop = RoundLoop(
        supersfl(), world.plans, world.state, Meddler(LocalTransport(world.clients), look)
    )
    after = world.trained(1)
    names = [name for name in after if name.startswith(("stage4.", "stage5.", "head."))]
    assert_same({n: after[n] for n in names}, {n: stepped[-1][n] for n in names})
    assert differences({n: after[n] for n in names}, {n: world.before[n] for n in names})
