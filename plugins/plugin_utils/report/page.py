# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Write a view as one HTML page that needs no other file."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from ansible_collections.headcni.mesh.plugins.plugin_utils.report.view import View
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).resolve().parents[3] / "playbooks" / "templates" / "report"


def page(view: View) -> str:
    """The page forbids browsers to load anything, and to run any script but its own. So markup that
    slipped through the escaping could still do nothing."""
    style, script = ((TEMPLATES / name).read_text() for name in ("page.css", "page.js"))
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return made.get_template("page.html.j2").render(
        view=view,
        # Both are files of this collection, without any data of a node.
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        allowed=f"default-src 'none'; style-src '{_sum(style)}'; script-src '{_sum(script)}'; "
        "base-uri 'none'; form-action 'none'",
    )


def _sum(content: str) -> str:
    return f"sha256-{b64encode(sha256(content.encode()).digest()).decode()}"
