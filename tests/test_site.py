"""The site as readers get it: its configuration, its Markdown copies, and every page in a real
browser.
"""

import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest
from notebook_checks import ROOT

pytest.importorskip("mkdocs", reason="the site needs mkdocs-material (extra dev)")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
# in the place of the index of 3 MB, which every page would read (the search has its own test)
NO_SEARCH = {
    "config": {"lang": ["en"], "separator": " ", "pipeline": [], "fields": {}},
    "docs": [],
}
LOOK = """() => ({
    h1: document.querySelectorAll("h1").length,
    wide: document.documentElement.scrollWidth - innerWidth,
    broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
    pictures: document.images.length,
    unnamed: [...document.images].filter(i => !i.alt).map(i => i.src),
    equations: document.querySelectorAll("math").length,
    faulty: document.querySelectorAll("merror, .arithmatex").length,
    links: [...document.querySelectorAll("a[href]")].map(a => a.href),
    ids: [...document.querySelectorAll("[id], a[name]")].map(e => e.id || e.name),
    paper: getComputedStyle(document.body).backgroundColor,
})"""


@pytest.fixture(scope="module")
def render():
    """docs/render.py as a module."""
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built by its command."""
    folder = tmp_path_factory.mktemp("site") / "built"
    command = [sys.executable, str(ROOT / "docs" / "render.py"), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """Addresses of all pages, relative to the site's folder."""
    found = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    return [page for page in found if page != "404.html"]


# ---- the configuration


@pytest.mark.parametrize(
    ("line", "changed", "said"),
    [
        (
            "type: website",
            "type: website\n  preview: true",
            "does not know the key project.preview",
        ),
        (
            "toc: true",
            "toc: true\n    code-fold: true",
            "does not know the key format.html.code-fold",
        ),
        (
            "html-math-method: mathml",
            "html-math-method: katex",
            "format.html.html-math-method is 'katex'",
        ),
        ("- index.ipynb", "- index.qmd", "must list notebooks and sections of notebooks"),
        (
            "- model/10_text.ipynb",
            "- 00_gone.ipynb",
            "names 00_gone.ipynb, which does not exist",
        ),
    ],
)
def test_what_is_not_known_ends_the_build(render, tmp_path, line, changed, said):
    text = (ROOT / "_quarto.yml").read_text("utf-8")
    assert line in text
    (tmp_path / "_quarto.yml").write_text(text.replace(line, changed), "utf-8")
    (tmp_path / "nbs").symlink_to(ROOT / "nbs")
    with pytest.raises(render.ConfigurationError, match=re.escape(said)):
        render.render(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dead_link_ends_the_build(render, tmp_path, caplog):
    """A site of one page: a link to an existing heading is fine, a link to a missing page stops the
    build.
    """
    for name in ("docs", "nbs/images"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "site.css", tmp_path / "docs")
    shutil.copy(ROOT / "nbs" / "nbdev.yml", tmp_path / "nbs")
    text = (ROOT / "_quarto.yml").read_text("utf-8")
    text = re.sub(r"(?m)(?<=^    contents:\n)(?: {6,}.*\n)+", "      - index.ipynb\n", text)
    (tmp_path / "_quarto.yml").write_text(text, "utf-8")

    def build(link):
        cell = {
            "cell_type": "markdown",
            "source": f"# One\n\n> A page.\n\n## Heading\n\n[there]({link})",
        }
        (tmp_path / "nbs" / "index.ipynb").write_text(json.dumps({"cells": [cell]}), "utf-8")
        return render.render(tmp_path, tmp_path / "out")

    folder, count = build("#heading")
    assert count == 2 and '<a href="#heading">there</a>' in (folder / "index.html").read_text(
        "utf-8"
    )
    for link in ("gone.ipynb", "#gone", "index.ipynb#gone"):
        caplog.clear()
        with pytest.raises(SystemExit):
            build(link)
        assert "gone" in caplog.text


@pytest.mark.thorough
def test_every_notebook_is_a_page(site, pages):
    notebooks = {
        str(path.relative_to(ROOT / "nbs").with_suffix(".html"))
        for path in (ROOT / "nbs").rglob("[!.]*.ipynb")
    }
    assert {page for page in pages if page != "api.html"} == {
        name for name in notebooks if "/." not in f"/{name}"
    }


@pytest.mark.thorough
def test_every_page_has_its_markdown_and_stands_in_llms_txt(site, pages):
    listed = re.findall(r"\]\((.+?)\): .", (site / "llms.txt").read_text("utf-8"))
    assert sorted(listed) == [f"{page}.md" for page in pages if page != "api.html"]
    for page in pages:
        markdown = (site / f"{page}.md").read_text("utf-8")
        assert markdown.startswith("# ") and ".ipynb)" not in markdown


@pytest.mark.thorough
def test_a_page_holds_its_outputs_and_its_reference(site):
    markdown = (site / "objectives" / "25_contrastive.html.md").read_text("utf-8")
    assert "## Reference of `anchor_embedding.objectives.contrastive`" in markdown
    assert re.search(
        r"#### Contrastive \{ #Contrastive \.api \}\s+```python\n(def|class) ", markdown
    )
    page = (site / "experiments" / "quickstart.html.md").read_text("utf-8")
    assert "(../images/experiments-quickstart-1.png)" in page


# ---- in a browser


@pytest.fixture(scope="module")
def address(site):
    """The site on a plain file server."""
    handler = partial(
        type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None}),
        directory=str(site),
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the browser test needs playwright (extra dev)"
    )
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not program:
        pytest.skip(f"no browser: install Debian's chromium (looked for {', '.join(BROWSERS)})")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser, address, request):
    """A tab that records console errors and requests to other hosts."""
    context = browser.new_context(**request.param)
    tab = context.new_page()
    tab.faults = []
    tab.on(
        "console",
        lambda message: (
            message.type in ("error", "warning") and tab.faults.append(f"console: {message.text}")
        ),
    )
    tab.on("pageerror", lambda error: tab.faults.append(f"error: {error}"))
    tab.on(
        "request",
        lambda asked: (
            asked.url.startswith((address, "data:")) or tab.faults.append(f"outside: {asked.url}")
        ),
    )
    tab.on(
        "response",
        lambda reply: reply.status < 400 or tab.faults.append(f"{reply.status}: {reply.url}"),
    )
    yield tab
    context.close()
    assert not tab.faults


def dead_links(address: str, site: Path, looks: dict) -> list[str]:
    """Internal links whose page, file or anchor does not exist."""
    ids = {urljoin(address, page): set(look["ids"]) for page, look in looks.items()}
    dead = []
    for page, look in looks.items():
        for link in look["links"]:
            target, anchor = urldefrag(link)
            if target == address:
                target += "index.html"
            if not target.startswith(address):
                continue
            there = target in ids or (site / unquote(target.removeprefix(address))).is_file()
            if not there or (anchor and unquote(anchor) not in ids.get(target, ())):
                dead.append(f"{page}: {link}")
    return dead


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.html.md").touch()
    there = [
        "http://x/",
        "http://x/#one",
        "http://x/a.html",
        "http://x/a.html.md",
        "http://elsewhere/b.html",
    ]
    gone = ["http://x/b.html", "http://x/a.html#one", "http://x/#two"]
    looks = {
        "index.html": {"ids": ["one"], "links": there + gone},
        "a.html": {"ids": [], "links": []},
    }
    assert dead_links("http://x/", tmp_path, looks) == [f"index.html: {link}" for link in gone]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "tab",
    [{"viewport": DESKTOP, "color_scheme": "light"}, {"viewport": PHONE, "color_scheme": "dark"}],
    indirect=True,
    ids=["desktop-light", "phone-dark"],
)
def test_every_page(tab, address, site, pages, request):
    tab.route("**/search_index.json", lambda asked: asked.fulfill(json=NO_SEARCH))
    looks = {}
    for page in pages:
        tab.goto(address + page, wait_until="load")
        looks[page] = tab.evaluate(LOOK)
    faults = {
        page: {key: look[key] for key in ("broken", "unnamed", "faulty") if look[key]}
        | ({"h1": look["h1"]} if look["h1"] != 1 else {})
        | ({"wide": look["wide"]} if look["wide"] > 0 else {})
        for page, look in looks.items()
    }
    assert not {page: fault for page, fault in faults.items() if fault}
    dark = "dark" in request.node.name
    shades = {sum(map(int, re.findall(r"\d+", look["paper"])[:3])) < 384 for look in looks.values()}
    assert shades == {dark}
    assert not dead_links(address, site, looks)
    total = {key: sum(look[key] for look in looks.values()) for key in ("pictures", "equations")}
    links = sum(link.startswith(address) for look in looks.values() for link in look["links"])
    print(
        f"{len(looks)} pages, {links} internal links, {total['pictures']} pictures, "
        f"{total['equations']} equations"
    )
    assert total["pictures"] > 10 and total["equations"] > 10


@pytest.mark.thorough
@pytest.mark.parametrize(
    "tab", [{"viewport": DESKTOP, "color_scheme": "light"}], indirect=True, ids=["desktop"]
)
def test_search_by_keyboard(tab, address):
    tab.goto(address + "index.html", wait_until="load")
    tab.keyboard.press("/")
    tab.keyboard.type("refinement", delay=20)
    tab.wait_for_selector(".md-search-result__item a")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    tab.wait_for_url(re.compile(r"refinement"))
    assert "refinement" in tab.inner_text("h1").lower()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "tab", [{"viewport": DESKTOP, "color_scheme": "light"}], indirect=True, ids=["desktop"]
)
def test_light_and_dark_by_choice(tab, address):
    tab.goto(address + "index.html", wait_until="load")

    def scheme():
        return tab.evaluate("document.body.getAttribute('data-md-color-scheme')")

    assert scheme() == "default"
    tab.click("label[title='Switch to dark']")
    assert scheme() == "slate"
    tab.goto(address + "api.html", wait_until="load")
    assert scheme() == "slate"
