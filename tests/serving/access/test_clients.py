"""NVIDIA's v2 client, unmodified, with a key in one header, on a server beyond loopback."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
import tritonclient.http as triton

from edge_sdk.wire.address import Address
from tests.serving.routes.v2.inference_site import Site
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.conftest import Exported

pytestmark = pytest.mark.broker  # the services start the embedded broker


@pytest.fixture(scope="module")
def site(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that counts as reachable by others, with the models digits and other."""
    state: Path = tmp_path_factory.mktemp("keys")
    exported.install(state / "models")
    exported.install(state / "models", name="other")
    made = Site(state, http=Address("0.0.0.0", 0), insecure=True)
    yield made
    made.close()


class Client:
    """tritonclient with or without a key."""

    def __init__(self, site: Site, key: str | None) -> None:
        self.client = triton.InferenceServerClient(f"127.0.0.1:{site.port}")
        self.headers = None if key is None else {"Authorization": f"Bearer {key}"}

    def infer(self, exported: Exported, model: str = "digits") -> Any:
        """Labels of five samples."""
        x = exported.x[:5]
        given = triton.InferInput("x", list(x.shape), "UINT8")
        given.set_data_from_numpy(x)
        answer = self.client.infer(model, [given], headers=self.headers)
        return answer.as_numpy("label")

    def answer(self, exported: Exported, model: str = "digits") -> str:
        """Status of a query."""
        try:
            self.infer(exported, model)
        except triton.InferenceServerException as err:
            return str(err.status())
        return "200"


def test_an_unmodified_client_asks_its_model_with_one_header(
    site: Site, exported: Exported
) -> None:
    keys = site.services.registry.keys
    _, key = keys.create(["infer"], name="app", models=["digits"])
    client = Client(site, key)
    expected = exported.logits(exported.x[:5].astype(np.float32)).argmax(axis=1)
    np.testing.assert_array_equal(client.infer(exported), expected)
    asked = {"headers": client.headers}
    assert client.client.is_server_live()  # without any login, as probes ask
    assert client.client.is_model_ready("digits", **asked)
    assert client.client.get_model_metadata("digits", **asked)["versions"] == ["1"]
    # the other model is neither served nor shown to it
    listed = client.client.get_model_repository_index(**asked)
    assert {one["name"] for one in listed} == {"digits"}
    assert client.answer(exported, "other") == "403"
    with pytest.raises(triton.InferenceServerException, match="digits"):
        client.client.get_model_metadata("other", **asked)

    load = site.services.inference.senders.counts()["key:app"]
    assert (load.answered, load.rows) == (1, 5)
    keys.revoke("app")
    wait_until(lambda: client.answer(exported) == "401", "the revoked key is not refused")
    assert Client(site, None).answer(exported) == "401"
    site.services.audit.write()
    events = site.services.registry.trail.entries()
    assert any((one.who, one.what) == ("key:app", "http.login") for one in events)
    refusal = next(one for one in events if one.outcome == "refused")
    assert refusal.what == "http.request"


def test_a_key_of_a_fleet_asks_the_model_that_the_fleet_runs_now(
    site: Site, exported: Exported
) -> None:
    _, key = site.services.registry.keys.create(["infer"], fleets=["yard"])
    client = Client(site, key)
    for model, not_now in (("other", "digits"), ("digits", "other")):
        site.services.registry.catalogue.assign("yard", model)
        assert client.infer(exported, model).shape == (5,)
        asked = partial(client.answer, exported, not_now)
        wait_until(lambda: asked() == "403", f"{not_now} is not refused")  # noqa: B023 - called here


def test_a_key_has_limits_of_its_own(site: Site, exported: Exported) -> None:
    _, key = site.services.registry.keys.create(["infer"], name="slow", requests=0.1)
    slow = Client(site, key)
    assert slow.infer(exported).shape == (5,)
    assert slow.answer(exported) == "429"
    _, key = site.services.registry.keys.create(["infer"], name="free")
    free = Client(site, key)
    for _ in range(3):
        free.infer(exported)


def test_what_a_key_changes_is_in_the_audit_log_under_its_name(site: Site) -> None:
    registry = site.services.registry
    _, operate = registry.keys.create(["operate"], name="ops")
    _, train = registry.keys.create(["train"], name="trainer")
    registry.redeem_token(registry.create_token(), "pi-7", {})

    def call(key: str, path: str, body: object = None) -> int:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        return site.call("POST", f"/api/v1/{path}", orjson.dumps(body), headers).status

    assert call(train, "devices/pi-7/command", {"op": "update"}) == 403
    assert call(train, "devices/pi-7/command", {"op": "train", "url": "http://t"}) == 202
    assert call(train, "devices/pi-7/revoke") == 403
    assert call(operate, "devices/pi-7/revoke") == 200
    done = {one.what: one.who for one in registry.trail.entries(about="pi-7")}
    assert done["device.revoke"] == "key:ops"
    assert done["device.command"] == "key:trainer"
