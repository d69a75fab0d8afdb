"""The page in a real browser: it shows the data, says nothing to the console and loads nothing."""

from __future__ import annotations

import os
from itertools import permutations
from pathlib import Path

import pytest
import report_mesh
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.page import page
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import Report
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.view import view
from chromium import Chromium, chromium
from report_mesh import HOSTILE, NOW

SIZES = (3, 20, 50, 500)
# The contrast of each visible text with the nearest background, as WCAG computes it.
CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const bad = new Set();
  for (const element of document.querySelectorAll("main *, header *, nav *, footer *")) {
    if (element.closest("svg, .hidden, details:not([open]) > :not(summary)")) continue;
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) bad.add(`${element.tagName}.${element.className}: ${contrast.toFixed(1)}`);
  }
  return [...bad];
})()
"""
# What sticks out of the window to the right, apart from what scrolls by itself.
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LABELS = """
(() => {
  const texts = [...document.querySelectorAll("#mesh .name, #mesh .detail")];
  const boxes = texts.map((text) => text.getBoundingClientRect());
  const frame = document.getElementById("mesh").getBoundingClientRect();
  const overlaps = boxes.flatMap((a, at) => boxes.filter((b, to) => at < to
    && texts[at].parentElement !== texts[to].parentElement
    && a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)).length;
  const outside = boxes.filter((box) => box.left < frame.left || box.right > frame.right
    || box.top < frame.top || box.bottom > frame.bottom).length;
  return [overlaps, outside];
})()
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def reports():
    return {size: report_mesh.report(size) for size in SIZES}


@pytest.fixture(scope="module")
def pages(reports, tmp_path_factory):
    """HEADCNI_REPORT_PICTURES=DIR keeps the pages there, with pictures of them."""
    kept = os.environ.get("HEADCNI_REPORT_PICTURES")
    folder = Path(kept).absolute() if kept else tmp_path_factory.mktemp("pages")
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for size, report in reports.items():
        found[size] = folder / f"{size}.html"
        found[size].write_text(page(view(report, "HeadCNI mesh", earlier(size))))
    return found


def earlier(size: int) -> Report:
    return report_mesh.report(size, NOW - 3600, node002={"unreachable": True})


def count(browser: Chromium, selector: str) -> int:
    return int(browser.value(f"document.querySelectorAll({selector!r}).length"))


@pytest.mark.parametrize("size", SIZES)
def test_the_drawing_and_the_tables_match_the_data(browser, pages, reports, size):
    browser.open(pages[size])
    shown = view(reports[size], "HeadCNI mesh", earlier(size))
    assert count(browser, "#mesh circle, #mesh rect.spot") == size
    assert count(browser, "#mesh line") == len(shown.drawing.lines)
    for kind in ("direct", "relayed", "none"):
        lines = sum(line.kind == kind for line in shown.drawing.lines)
        assert count(browser, f"#mesh line.{kind}") == lines
    if size <= 30:
        assert len(shown.drawing.lines) == size * (size - 1) // 2
    for state in ("good", "doubtful", "bad"):
        nodes = sum(spot.state == state for spot in shown.drawing.spots)
        assert count(browser, f"#mesh .spot.{state}") == nodes
        assert count(browser, f"#node-table tr[data-state={state}]") == nodes
    assert count(browser, "#node-table tbody tr") == size
    cells = sum(cell.measured > 0 for row in shown.heat.rows for cell in row.cells)
    assert count(browser, "#heat td.cell") == cells
    assert count(browser, "#heat tbody tr") == len(shown.heat.rows)
    assert count(browser, ".problem") == len(shown.problems)
    assert count(browser, "#change-table tbody tr") == len(shown.changes) > 0


@pytest.mark.parametrize("size", SIZES)
def test_the_console_stays_empty_and_nothing_is_loaded(browser, pages, size):
    browser.open(pages[size])
    assert (
        browser.value("document.getElementById('shown').textContent") == f"{size} of {size} nodes"
    )
    assert browser.said == []
    assert browser.requests == [pages[size].as_uri()]


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
@pytest.mark.parametrize("size", [3, 50])
def test_every_text_has_enough_contrast(browser, pages, size, theme):
    browser.open(pages[size], theme="light" if theme == "light" else "dark")
    if theme == "print":
        browser.media("dark", "print")
    assert browser.value(CONTRAST) == []


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits_into_the_window(browser, pages, size, width):
    browser.open(pages[size], width)
    assert browser.value(TOO_WIDE) <= 0


@pytest.mark.parametrize("size", [2, 3, 8, 12, 13, 20, 21, 30])
def test_names_in_the_drawing_do_not_hide_each_other(browser, tmp_path, size):
    (tmp_path / "page.html").write_text(page(view(report_mesh.report(size), "mesh", None)))
    browser.open(tmp_path / "page.html")
    assert browser.value(LABELS) == [0, 0]


def test_the_drawing_is_paper_white_in_print_and_folded_tables_are_open(browser, pages):
    browser.open(pages[20], theme="dark")
    assert not browser.value("document.querySelector('details').open")
    assert browser.pdf().startswith(b"%PDF")
    assert browser.value("document.querySelector('details').open")
    browser.media("dark", "print")
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert count(browser, ".tall") == 1 and not browser.value(
        "getComputedStyle(document.querySelector('.tall')).maxHeight !== 'none'"
    )


def test_the_theme_can_be_chosen(browser, pages):
    browser.open(pages[3], theme="dark")
    colours = []
    for _ in range(3):
        colours.append(browser.value("getComputedStyle(document.body).backgroundColor"))
        browser.value("document.getElementById('theme').click()")
    assert colours == ["rgb(18, 23, 30)", "rgb(255, 255, 255)", "rgb(18, 23, 30)"]


def test_a_keyboard_reaches_everything_and_a_node_leads_to_its_row(browser, pages):
    browser.open(pages[3])
    reached = []
    for _ in range(40):
        browser.press("Tab", 9)
        label = browser.value(
            "(document.activeElement.getAttribute('aria-label') ||"
            " document.activeElement.textContent || document.activeElement.id).trim()"
        )
        reached.append(label)
        if label.startswith("node001: "):
            break
    assert reached[0] == "Skip to the problems" and "Theme: automatic" in reached
    assert "Latency and loss" in reached and "Drawing of the mesh" in reached
    assert count(browser, "#mesh line.of-node") == 2  # the focus shows the node's paths
    browser.press("Enter", 13, "\r")
    assert browser.value("document.querySelector('tr:target').dataset.node") == "node001"


def test_a_screen_reader_gets_names_for_everything(browser, pages):
    for size in (3, 500):
        browser.open(pages[size])
        told = browser.accessible()
        for role in (
            "table",
            "region",
            "button",
            "link",
            "searchbox",
            "checkbox",
            "image",
            "navigation",
        ):
            assert all(name for kind, name in told if kind == role), role
        tables = [name for kind, name in told if kind == "table"]
        assert "All nodes, those with problems first" in tables
        assert any(name.startswith("Latency in milliseconds and loss") for name in tables)
        assert sum(kind == "rowheader" for kind, _ in told) >= size
        headings = [name for kind, name in told if kind == "heading"]
        assert headings[:2] == ["HeadCNI mesh", "Problems"]
    assert "Topology of the mesh" in [name for kind, name in told if kind in ("image", "img")]


def test_nodes_can_be_filtered(browser, pages):
    browser.open(pages[500])
    browser.value(
        "(() => { const words = document.getElementById('words'); words.value = 'node04';"
        " words.dispatchEvent(new Event('input')); })()"
    )
    visible = "[...document.querySelectorAll('#node-table tbody tr')].filter(r => !r.hidden).length"
    assert browser.value(visible) == 10
    assert browser.value("document.getElementById('shown').textContent") == "10 of 500 nodes"
    browser.value("document.getElementById('only').click()")
    assert 0 < browser.value(visible) < 10


def test_a_hostile_node_does_nothing_in_the_browser(browser, tmp_path):
    answer = report_mesh.survey(0, 3)
    answer["status"] |= {"mode": HOSTILE, "version": HOSTILE, "warnings": [{"message": HOSTILE}]}
    answer["findings"] = [{"id": "x", "found": HOSTILE, "means": HOSTILE, "run": HOSTILE}]
    answer["paths"][0]["through"] = HOSTILE
    report = report_mesh.report(3, node001=answer)
    (tmp_path / "page.html").write_text(page(view(report, HOSTILE, None)))
    browser.open(tmp_path / "page.html")
    assert browser.said == [] and len(browser.requests) == 1
    assert count(browser, "img") == 0 and count(browser, "script") == 1
    assert HOSTILE in browser.value("document.querySelector('.problem').textContent")
    assert browser.value("document.title").startswith(HOSTILE.partition(" ")[0])


def test_a_script_that_slipped_through_would_not_run(browser, tmp_path, pages):
    """The page's own policy forbids it: this is not the escaping."""
    broken = (
        pages[3]
        .read_text()
        .replace("</main>", "<script>document.title = 'run'</script><img src='x.png'></main>")
    )
    (tmp_path / "page.html").write_text(broken)
    browser.open(tmp_path / "page.html")
    assert browser.value("document.title") != "run"
    assert any("Content Security Policy" in line for line in browser.said)
    assert len([line for line in browser.said if "violates" in line]) == 2


def test_pictures_differ_where_they_should(browser, pages, tmp_path):
    """They are also what somebody looks at after a change."""
    kept = os.environ.get("HEADCNI_REPORT_PICTURES")
    folder = Path(kept) if kept else tmp_path
    seen = set()
    for size, (width, theme) in [
        (size, look)
        for size in SIZES
        for look in ((1280, "light"), (1280, "dark"), (390, "light"), (900, "print"))
    ]:
        browser.open(pages[size], width, theme="light" if theme == "print" else theme)
        if theme == "print":
            browser.media("light", "print")
        picture = browser.whole_picture()
        (folder / f"{size}-{width}-{theme}.png").write_bytes(picture)
        assert picture not in seen and len(picture) > 20_000
        seen.add(picture)
    assert len(seen) == len(SIZES) * 4


def test_each_pair_of_the_heat_map_has_its_title(browser, pages):
    browser.open(pages[3])
    titles = browser.value(
        "[...document.querySelectorAll('#heat td.cell')].map(cell => cell.title)"
    )
    pairs = {title.partition(":")[0] for title in titles}
    names = [report_mesh.name_of(at) for at in range(3)]
    assert pairs == {f"{a} → {b}" for a, b in permutations(names, 2)}
