"""Signed files for devices: `/tuf/metadata/…` and `/tuf/targets/…`.

Range requests are answered, so that a download resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

from server.registry.artifacts import ArtifactRepository
from server.routes.authentication import CredentialStore, authenticate
from server.routes.errors import error_response


class ArtifactFiles(CredentialStore, Protocol):
    """The part of the server that these routes need."""

    @property
    def artifacts(self) -> ArtifactRepository:
        """The signed bundles."""


def router(files: ArtifactFiles) -> APIRouter:
    """The routes over `files`, for devices and the operator only."""
    routes = APIRouter()
    folders = {
        "metadata": files.artifacts.metadata_folder,
        "targets": files.artifacts.targets_folder,
    }

    @routes.get("/tuf/{part}/{path:path}", response_model=None)
    def signed_file(request: Request, part: str, path: str) -> Response:
        authenticate(files, request)
        file = _inside(folders.get(part), path)
        if file is None:
            return error_response(404, f"{part}/{path}: not found")
        return FileResponse(file, media_type="application/octet-stream")

    return routes


def _inside(folder: Path | None, path: str) -> Path | None:
    """The file, if it exists and lies in the folder after links and `..` are resolved."""
    if folder is None or "\0" in path:
        return None
    file = (folder / path).resolve()
    return file if file.is_relative_to(folder.resolve()) and file.is_file() else None
