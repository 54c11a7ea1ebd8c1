"""What mkdocs calls as it builds the site: generated pages, and files from outside docs/."""

from __future__ import annotations

from importlib import import_module
from posixpath import dirname, relpath
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import edge_sdk
from docs.site import commands, settings
from docs.site.links import ROOT, outside, site_place, source_of, with_links_of_site

# The search of a page that is read from a disk needs this; the theme would fetch it from elsewhere.
SHIM_URL: Final = "https://unpkg.com/iframe-worker/shim"
SHIM: Final = "assets/iframe-worker.js"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from code, and what documents link to outside docs/."""
    made = {
        "reference/commands.md": commands.page(),
        "reference/recipe.md": settings.recipe_page(),
        "reference/agent-toml.md": settings.agent_page(),
        "reference/python.md": python_page(),
        "decisions/index.md": decisions_page(),
    }
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    for source in outside():
        files.append(File.generated(config, site_place(source), abs_src_path=str(ROOT / source)))
    shim = ROOT / "docs" / "site" / "iframe-worker" / "shim.js"
    files.append(File.generated(config, SHIM, abs_src_path=str(shim)))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take our own copy of the shim of the search."""
    del config
    return output.replace(SHIM_URL, relpath(SHIM, dirname(page.file.dest_uri) or "."))


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Take our own copy of the shim on the page for what is not found, too."""
    del template_name, config
    return output.replace(SHIM_URL, f"/{SHIM}")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where their files are on the site."""
    del config, files
    place = page.file.src_uri
    if place.startswith("reference/") or place == "decisions/index.md":
        return markdown  # made here, with links of the site
    return with_links_of_site(markdown, source_of(place))


def decisions_page() -> str:
    """The list of the decisions, newest first, by the titles of their pages."""
    lines = ["# Decisions", "", "Half a page for each choice that a reader may question.", ""]
    for page in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"), reverse=True):
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({page.name})")
    return "\n".join(lines)


def python_page() -> str:
    """The page of the names that `import edge_sdk` gives, for mkdocstrings."""
    lines = [
        "# Python on the device",
        "",
        "`import edge_sdk` gives these names. It loads neither torch nor a web framework.",
        "",
    ]
    for name in edge_sdk.__all__:
        if not name.startswith("__"):
            home = getattr(edge_sdk, name).__module__
            assert hasattr(import_module(home), name)
            lines += [f"::: {home}.{name}", "    options:", "      heading_level: 2", ""]
    return "\n".join(lines)
