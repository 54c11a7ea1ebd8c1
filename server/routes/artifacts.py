"""Signed files for devices: `/tuf/metadata/…` and `/tuf/targets/…`.

Range requests are answered, so that a download resumes.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Protocol

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

from server.routes.errors import error_response
from server.signing.artifacts import SignedFiles


class ArtifactFiles(Protocol):
    """The part of a process that these routes need."""

    @property
    def signed(self) -> SignedFiles:
        """The folders of the signed bundles."""


def router(files: ArtifactFiles) -> APIRouter:
    """The routes over `files`."""
    routes = APIRouter()
    folders = {"metadata": files.signed.metadata_folder, "targets": files.signed.targets_folder}

    @routes.get("/tuf/{part}/{path:path}", response_model=None)
    def signed_file(part: str, path: str) -> Response:
        file = _inside(folders.get(part), path)
        if file is None:
            return error_response(404, f"{part}/{path}: not found")
        return FileResponse(file, media_type="application/octet-stream")

    return routes


def _inside(folder: Path | None, path: str) -> Path | None:
    """The regular file in the folder, if it exists; no link on the way to it is followed."""
    parts = path.split("/")
    if folder is None or "\0" in path or any(part in {"", ".", ".."} for part in parts):
        return None
    step = folder
    try:
        for part in parts:
            step /= part
            kind = step.lstat().st_mode
            if stat.S_ISLNK(kind):
                return None
    except (OSError, UnicodeEncodeError):  # it is not there, or its name is longer than any file's
        return None
    return step if stat.S_ISREG(kind) else None
