"""The models and the fleets' assignments: `/api/v1/models`, `/api/v1/fleets`, for the operator.

The command line offers the same: `splitedge server models …`.
"""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from server.backend.models import ModelStore
from server.deployment.overview import version_states
from server.deployment.removal import ModelRemoval
from server.registry.catalogue import MAX_VERSION
from server.registry.records import FleetModel, ModelVersion
from server.routes.authentication import Presence
from server.routes.turns import RegistryRoute
from server.settings import ServerSettings
from server.signing.artifacts import ArtifactRepository


class ModelServices(Presence, Protocol):
    """The part of the server that these routes need; called from several threads at once."""

    @property
    def artifacts(self) -> ArtifactRepository:
        """The signed bundles."""

    @property
    def settings(self) -> ServerSettings:
        """The state folder."""

    @property
    def models(self) -> ModelStore:
        """The models that are served."""


class RefusalView(BaseModel):
    """A device that could not take on a version, and the reason."""

    model_config = ConfigDict(from_attributes=True)

    device: str
    why: str


class VersionView(BaseModel):
    """A published version: the fleets and devices that should run it, do run it, or refused it."""

    model_config = ConfigDict(from_attributes=True)

    model: str
    version: int
    active: bool
    published_at: float
    activated_at: float | None
    fleets: list[str]
    pinned: list[str]
    wanted_by: list[str]
    run_by: list[str]
    refused_by: list[RefusalView]


class FleetView(BaseModel):
    """A fleet's model; `pinned` to the version, or following the model's active one."""

    model_config = ConfigDict(from_attributes=True)

    fleet: str
    model: str | None
    version: int | None
    pinned: bool
    assigned: bool


class NotLoadedView(BaseModel):
    """A version on the disk that is not served, because it cannot be loaded, and why."""

    model: str
    version: str
    why: str


class Overview(BaseModel):
    """All versions and all fleets, and what could not be loaded."""

    models: list[VersionView]
    fleets: list[FleetView]
    not_loaded: list[NotLoadedView]


class FleetAssignment(BaseModel):
    """The model that a fleet is to run; with a version it is pinned to that version."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(max_length=63)
    version: int | None = Field(default=None, ge=1, le=MAX_VERSION)


class Activation(BaseModel):
    """The version that is active now, and the one that a roll-back left."""

    active: str
    left: str | None = None


class Removal(BaseModel):
    """The versions that were removed."""

    removed: list[str]


def router(services: ModelServices) -> APIRouter:
    """The routes over `services`."""
    api = APIRouter(prefix="/api/v1", route_class=RegistryRoute, tags=["models"])
    _add_models(api, services)
    _add_fleets(api, services)
    return api


def _add_models(api: APIRouter, services: ModelServices) -> None:
    catalogue = services.registry.catalogue
    removal = ModelRemoval(
        services.registry, services.artifacts, services.settings.state / "models"
    )

    @api.get("/models")
    def listed() -> Overview:
        """All versions and fleets: what devices run, want and refused."""
        return Overview(
            models=[VersionView.model_validate(one) for one in version_states(services.registry)],
            fleets=[FleetView.model_validate(one) for one in catalogue.fleets()],
            not_loaded=[
                NotLoadedView(model=model, version=version, why=why)
                for (model, version), why in services.models.broken().items()
            ],
        )

    @api.post("/models/{name}/versions/{version}/activate")
    def activate(name: str, version: int) -> Activation:
        """Make a version the active one of its model; its fleets move to it within seconds."""
        return Activation(active=str(catalogue.activate(name, version)))

    @api.post("/models/{name}/rollback")
    def roll_back(name: str) -> Activation:
        """Activate the version that was active before; its fleets move back within seconds."""
        active, left = catalogue.roll_back(name)
        return Activation(active=str(active), left=str(left))

    @api.delete("/models/{name}/versions/{version}")
    def remove(name: str, version: int, *, force: bool = False) -> Removal:
        """Remove a version and its files; its number is never used again."""
        return _removed(removal.remove(name, version, force=force))

    @api.delete("/models/{name}")
    def remove_all(name: str, *, force: bool = False) -> Removal:
        """Remove all versions of a model."""
        return _removed(removal.remove(name, force=force))


def _add_fleets(api: APIRouter, services: ModelServices) -> None:
    catalogue = services.registry.catalogue

    @api.put("/fleets/{fleet}/model")
    def assign(fleet: str, body: FleetAssignment) -> FleetView:
        """Give a fleet a model, or pin it to a version; its devices move within seconds."""
        return _view(catalogue.assign(fleet, body.model, body.version))

    @api.delete("/fleets/{fleet}/model")
    def unassign(fleet: str) -> FleetView:
        """Give a fleet the model that was exported first, as new fleets have."""
        return _view(catalogue.unassign(fleet))


def _view(fleet: FleetModel) -> FleetView:
    return FleetView.model_validate(fleet)


def _removed(versions: tuple[ModelVersion, ...]) -> Removal:
    return Removal(removed=[str(one) for one in versions])
