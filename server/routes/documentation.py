"""The description of the API: `/docs` for people, `/openapi.json` for programs.

The page loads nothing from other hosts: its files lie in the package fastapi-offline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import fastapi_offline
from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse

# a web page that shows the API must not be able to ask others
POLICY: Final = "default-src 'self' 'unsafe-inline' data:; frame-ancestors 'none'"

File = Literal["swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"]


def router(app: FastAPI) -> APIRouter:
    """The routes that describe `app`."""
    routes = APIRouter(include_in_schema=False)
    folder = Path(fastapi_offline.__file__).parent / "static"

    @routes.get("/openapi.json")
    def openapi() -> dict[str, Any]:
        return app.openapi()

    @routes.get("/docs")
    def docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url="/openapi.json",
            title=app.title,
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="/docs/favicon.png",
        )
        page.headers["Content-Security-Policy"] = POLICY
        return page

    @routes.get("/docs/{file}")
    def docs_file(file: File) -> FileResponse:
        return FileResponse(folder / file)

    return routes
