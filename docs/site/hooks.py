"""What the documentation site has in addition to the pages of docs/.

- The README as its first page, the changelog, the roles' READMEs and the decision records.
- A page for each module, by ansible-doc.
- Mermaid, so that diagrams need no other server.

A link to a file that is not part of the site leads to the repository.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify
from pymdownx.superfences import fence_code_format

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(CHECKOUT / "tests/support")]

import list_indent  # noqa: E402
import module_pages  # noqa: E402

REPOSITORY = "https://github.com/headcni/mesh"
# Files of the repository that are pages of the site, under another name.
ALSO = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"} | {
    f"roles/{name}/README.md": f"roles/{name}.md"
    for name in ("tailscale", "headcni_node", "headscale_routes")
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
REFERENCE = re.compile(r"(?m)^(\[[^]]+\]: )(?![a-z]+:)(\S+)$")
LOADER = """import { mermaid } from "./index.js";
window.mermaid = mermaid;
"""

_modules: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> None:
    """The parts of the navigation that follow the code, anchors as GitHub has them, diagrams."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    mermaid = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [mermaid]}
    _modules.update(module_pages.pages())
    decisions = sorted((CHECKOUT / "docs/decisions").glob("*.md"))
    sections = {next(iter(entry)): next(iter(entry.values())) for entry in config.nav or ()}
    sections["Reference"] += [
        {"Roles": [{name: page} for name, page in _roles()]},
        {"Modules": [{name: f"modules/{name}.md"} for name in sorted(_modules)]},
        {"Changelog": "changelog.md"},
    ]
    sections["Development"] += [{"Decisions": [f"decisions/{path.name}" for path in decisions]}]


def _roles() -> list[tuple[str, str]]:
    return [(Path(page).stem, page) for page in ALSO.values() if page.startswith("roles/")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in ALSO.items():
        files.append(File.generated(config, page, content=(CHECKOUT / source).read_text()))
    for name, text in _modules.items():
        files.append(File.generated(config, f"modules/{name}.md", content=text))
    files.append(File.generated(config, "assets/mermaid/load.js", content=LOADER))
    for path in sorted(_mermaid().glob("*.js")):
        files.append(File.generated(config, f"assets/mermaid/{path.name}", abs_src_path=str(path)))
    return files


def _mermaid() -> Path:
    found = importlib.util.find_spec("nicegui")
    if found is None or found.origin is None:
        raise PluginError(
            "Mermaid is missing: run make docs, which installs docs/site/mermaid.lock"
        )
    return Path(found.origin).parent / "elements/mermaid/dist"


def on_page_markdown(markdown: str, page: Page, **_unused: Any) -> str:
    source = next((one for one, name in ALSO.items() if name == page.file.src_uri), "")
    folder = CHECKOUT / (source or f"docs/{page.file.src_uri}")

    def leading(target: str) -> str:
        return _leading(target, folder.parent, page.file.src_uri)

    text = LINK.sub(lambda found: leading(found[1]), markdown)
    text = REFERENCE.sub(lambda found: found[1] + leading(found[2]), text)
    return list_indent.for_site(text)


def _leading(target: str, folder: Path, page: str) -> str:
    """The link as this page of the site needs it."""
    path = (folder / target).resolve()
    if not path.exists():
        raise PluginError(f"{page}: the link {target} leads to no file")
    name = path.relative_to(CHECKOUT).as_posix()
    up = "../" * page.count("/")
    if name in ALSO:
        return up + ALSO[name]
    if name.startswith("docs/") and path.is_file():
        return up + name.removeprefix("docs/")
    return f"{REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{name}"
