"""Renders the site that `_quarto.yml` describes, without Quarto: `python docs/render.py`, then `python -m http.server -d _docs`.

Each page of the sidebar becomes one Markdown file: text, visible code, committed outputs and, for a module, the signatures
of what it exports. MkDocs with the Material theme turns them into the site (navigation, search, light and dark, all assets
local). The Markdown itself is kept beside each page as `PAGE.html.md` and listed in `llms.txt`. Nothing is executed.
A key of `_quarto.yml` that this file does not know stops the build.
"""

import argparse
import base64
import html
import importlib
import json
import logging
import re
import shutil
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
TEXT = object()
FLAG = (True, False)
FILES = object()  # kinds of values: any text; yes or no; a list
KNOWN = {
    "project": {"type": ("website",), "output-dir": TEXT},
    "metadata-files": FILES,
    "website": {
        **dict.fromkeys(("title", "description", "site-url", "repo-url", "repo-branch"), TEXT),
        "navbar": {"background": ("primary",), "search": FLAG},
        "sidebar": {"style": ("floating",), "contents": FILES},
    },
    "format": {
        "html": {
            "theme": {"light": ("cosmo",), "dark": ("darkly",)},
            "toc": FLAG,
            "html-math-method": ("mathml",),
        }
    },
    "format-links": FILES,
}


class ConfigurationError(Exception):
    """`_quarto.yml` asks for something that this renderer does not support."""


# ---- _quarto.yml


def check(found, known, name: str = "") -> None:
    """Raises ConfigurationError with the name of a key or value that `KNOWN` does not list."""
    if isinstance(known, dict):
        if not isinstance(found, dict):
            raise ConfigurationError(
                f"_quarto.yml: {name or 'the file'} must be a mapping, not {found!r}."
            )
        for key, value in found.items():
            path = f"{name}.{key}" if name else str(key)
            if key not in known:
                raise ConfigurationError(
                    f"_quarto.yml: docs/render.py does not know the key {path}."
                )
            check(value, known[key], path)
    elif isinstance(known, tuple) and found not in known:
        raise ConfigurationError(
            f"_quarto.yml: {name} is {found!r}; docs/render.py knows "
            f"{' and '.join(map(repr, known))}."
        )
    elif known is FILES and not isinstance(found, list):
        raise ConfigurationError(f"_quarto.yml: {name} must be a list, not {found!r}.")


def merge(first: dict, second: dict) -> dict:
    """Both dictionaries, key by key; values of `second` replace those of `first`."""
    both = {
        key: merge(first[key], second[key])
        for key in first.keys() & second.keys()
        if isinstance(first[key], dict)
    }
    return {**first, **second, **both}


def read_configuration(root: Path) -> dict:
    """`_quarto.yml`, merged over the files that its metadata-files name."""
    own = yaml.safe_load((root / "_quarto.yml").read_text("utf-8"))
    check(own, KNOWN)
    config = {}
    for name in own.get("metadata-files", []):
        config = merge(config, yaml.safe_load((root / "nbs" / name).read_text("utf-8")))
    check(config, KNOWN)
    return merge(config, own)


def sections(contents: list) -> list[tuple[str, list[str]]]:
    """(section, its pages) for each entry of a sidebar; the section of a single page is empty."""
    groups = []
    for entry in contents:
        if isinstance(entry, str):
            entry = {"section": "", "contents": [entry]}
        complete = isinstance(entry, dict) and entry.keys() == {"section", "contents"}
        if not complete or not all(str(name).endswith(".ipynb") for name in entry["contents"]):
            raise ConfigurationError(
                "_quarto.yml: website.sidebar.contents must list notebooks and sections of "
                f"notebooks, not {entry!r}."
            )
        groups.append((entry["section"], entry["contents"]))
    return groups


# ---- a notebook as Markdown


def text(lines) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def fenced(code: str, language: str) -> str:
    """A code block, with a fence longer than any inside it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
    return f"{fence}{language}\n{code.strip()}\n{fence}"


def relinked(markdown: str, page_of: dict[str, str], suffix: str) -> str:
    """Turns links to notebooks, and to MODULE.html as nbdev writes them, into links to pages."""
    markdown = re.sub(
        r"\]\(([\w.]+)\.html(?=[)#])", lambda m: f"]({page_of.get(m[1], m[1])}.ipynb", markdown
    )
    return re.sub(r"(\]\((?!\w+:)[^)\s#]*)\.ipynb(?=[)#])", rf"\1{suffix}", markdown)


class Page:
    """A notebook as Markdown, with the pictures among its outputs."""

    def __init__(self, notebook: Path, name: str):
        if not notebook.is_file():
            raise ConfigurationError(
                f"_quarto.yml: website.sidebar.contents names {name}.ipynb, which does not exist."
            )
        self.name = name
        self.pictures = {}
        self.heading = ""
        cells = json.loads(notebook.read_text("utf-8"))["cells"]
        sources = [text(cell["source"]) for cell in cells]
        self.module = next(
            (m[1] for s in sources if (m := re.search(r"(?m)^#\| *default_exp[: ]+([\w.]+)", s))),
            "",
        )
        self.title = sources[0].split("\n", 1)[0].removeprefix("# ").strip()
        quote = re.search(r"(?m)^> *(.+)", sources[0])
        self.about = quote[1] if quote else ""
        self.markdown = "\n\n".join(
            part for cell in cells for part in self.shown(cell) if part.strip()
        )

    def shown(self, cell: dict) -> list[str]:
        """The parts of a cell that a reader sees."""
        source = text(cell["source"])
        if cell["cell_type"] == "markdown":
            self.heading = (re.findall(r"(?m)^#+ +(.+)", source) or [self.heading])[-1]
            return [source]
        if cell["cell_type"] != "code" or re.search(
            r"(?m)^#\| *(hide|default_exp|include: *false)\b", source
        ):
            return []
        code = re.sub(r"(?m)^#\|.*\n?", "", source)
        hidden = re.search(r"(?m)^#\| *echo: *false", source) or not code.strip()
        return [*([] if hidden else [fenced(code, "python")]), *map(self.output, cell["outputs"])]

    def output(self, out: dict) -> str:
        """An output, in the richest form that it has."""
        data = {
            kind: text(value)
            for kind, value in out.get("data", {"text/plain": out.get("text", "")}).items()
        }
        if "image/png" in data:
            name = f"images/{self.name.replace('/', '-')}-{len(self.pictures) + 1}.png"
            self.pictures[name] = base64.b64decode(data["image/png"])
            return f"![Plot: {self.heading}]({'../' * self.name.count('/')}{name})"
        if "text/markdown" in data:
            return data["text/markdown"]
        if "text/html" in data:
            return (
                '<div class="output">\n'
                + re.sub(r"\n\s*\n", "\n", data["text/html"]).strip()
                + "\n</div>"
            )
        return fenced(data["text/plain"], "text") if data["text/plain"].strip() else ""


# ---- what the modules export


def reference(module: str) -> tuple[str, list[str]]:
    """Markdown with the signature, parameter comments and docstring of everything that a module
    exports, and the names.
    """
    from nbdev.showdoc import MarkdownRenderer, show_doc

    loaded = importlib.import_module(f"anchor_embedding.{module}")
    own = {name: getattr(loaded, name) for name in loaded.__all__}
    own = {
        name: value
        for name, value in own.items()
        if getattr(value, "__module__", "") == loaded.__name__ and callable(value)
    }
    parts = [f"## Reference of `anchor_embedding.{module}`"] if own else []
    for name, value in own.items():
        described = show_doc(value, renderer=MarkdownRenderer)._repr_markdown_().strip()
        parts.append(
            f"#### {name} {{ #{name} .api }}\n\n"
            + re.sub(r"\banchor_embedding\.[\w.]+\.(?=[A-Z])", "", described)
        )
    return "\n\n".join(parts), list(own)


def overview(pages: list[Page], names: dict[str, list[str]]) -> str:
    """A table of all modules and what they export."""
    lines = [
        "# API",
        "",
        "> What every module exports, with links to signatures and parameters.",
        "",
    ]
    lines += ["| module | exports |", "|---|---|"]
    for page in pages:
        links = ", ".join(
            f"[`{name}`]({page.name}.ipynb#{name})" for name in names.get(page.module, [])
        )
        if links:
            lines.append(f"| [`{page.module}`]({page.name}.ipynb) | {links} |")
    return "\n".join(lines)


# ---- the site


def on_page_content(content: str, **_) -> str:
    """Turns equations into MathML; MkDocs calls this for each page."""
    from latex2mathml.converter import convert

    def mathml(match: re.Match) -> str:
        display = "block" if match[1] == "div" else "inline"
        return f'<{match[1]} class="math">{convert(html.unescape(match[2]).strip()[2:-2].strip(), display=display)}</{match[1]}>'

    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', mathml, content, flags=re.DOTALL)


def settings(config: dict, source: Path, out: Path, nav: list) -> dict:
    """The configuration of MkDocs."""
    website = config["website"]
    toc = config["format"]["html"].get("toc", True)
    switch = [("light", "white", "dark"), ("dark", "black", "light")]
    search = [{"search": {}}] if website.get("navbar", {}).get("search", True) else []
    return {
        "site_name": website["title"],
        "site_description": website.get("description", ""),
        "repo_url": website.get("repo-url", ""),
        "docs_dir": str(source),
        "site_dir": str(out),
        "use_directory_urls": False,
        "nav": nav,
        "plugins": search,
        "hooks": [__file__],
        "extra_css": ["site.css"],
        "theme": {
            "name": "material",
            "font": False,
            "icon": {"logo": "material/anchor"},
            "features": [
                "navigation.sections",
                "navigation.top",
                "navigation.footer",
                "content.code.copy",
                "search.highlight",
                "toc.follow",
            ],
            "palette": [
                {
                    "media": f"(prefers-color-scheme: {name})",
                    "scheme": {"light": "default", "dark": "slate"}[name],
                    "primary": primary,
                    "accent": "deep orange",
                    "toggle": {"icon": "material/theme-light-dark", "name": f"Switch to {other}"},
                }
                for name, primary, other in switch
            ],
        },
        "extra": {"generator": False},
        "markdown_extensions": [
            "admonition",
            "attr_list",
            "md_in_html",
            "tables",
            {"pymdownx.highlight": {"pygments_lang_class": True}},
            "pymdownx.superfences",
            {"pymdownx.arithmatex": {"generic": True}},
            {"toc": {"permalink": True, "toc_depth": "2-3" if toc else 0}},
        ],
        "validation": {
            "nav": {"omitted_files": "warn", "not_found": "warn", "absolute_links": "warn"},
            "links": {
                "not_found": "warn",
                "anchors": "warn",
                "absolute_links": "warn",
                "unrecognized_links": "warn",
            },
        },
        "strict": True,
    }


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))


def llms(config: dict, groups: list, pages: dict[str, Page]) -> str:
    """The index for language models (llmstxt.org): each page's Markdown and its description."""
    lines = [
        f"# {config['website']['title']}",
        "",
        f"> {config['website'].get('description') or pages['index'].about}",
        "",
    ]
    for section, names in groups:
        lines += ["", f"## {section}", ""] if section else []
        lines += [f"- [{pages[name].title}]({name}.html.md): {pages[name].about}" for name in names]
    return "\n".join(lines) + "\n"


def render(root: Path, out: Path | None = None) -> tuple[Path, int]:
    """Builds the site; returns its folder and its number of pages."""
    config = read_configuration(root)
    out = out or root / config["project"].get("output-dir", "_docs")
    groups = [
        (section, [name.removesuffix(".ipynb") for name in names])
        for section, names in sections(config["website"]["sidebar"]["contents"])
    ]
    pages = {
        name: Page(root / "nbs" / f"{name}.ipynb", name) for _, names in groups for name in names
    }
    page_of = {page.module: name for name, page in pages.items() if page.module}
    exported = {}
    files = {}
    pictures = {}
    for name, page in pages.items():
        files[name] = page.markdown
        pictures |= page.pictures
        if page.module:
            described, exported[page.module] = reference(page.module)
            files[name] += "\n\n" + described
    files["api"] = overview(list(pages.values()), exported)
    nav = [
        {section: [f"{name}.md" for name in names]} if section else f"{names[0]}.md"
        for section, names in groups
    ]
    with tempfile.TemporaryDirectory() as stage:
        source = Path(stage) / "source"
        write(
            source,
            {f"{name}.md": relinked(markdown, page_of, ".md") for name, markdown in files.items()}
            | pictures,
        )
        shutil.copytree(root / "nbs" / "images", source / "images", dirs_exist_ok=True)
        shutil.copy(root / "docs" / "site.css", source)
        build(settings(config, source, out, [*nav, "api.md"]), Path(stage))
    write(
        out,
        {
            f"{name}.html.md": relinked(markdown, page_of, ".html.md") + "\n"
            for name, markdown in files.items()
        },
    )
    write(out, {"llms.txt": llms(config, groups, pages), ".nojekyll": ""})
    return out, len(files)


def build(config: dict, folder: Path) -> None:
    """Runs MkDocs on a configuration; every warning, such as a dead link, is an error."""
    from mkdocs.commands.build import build as make
    from mkdocs.config import load_config
    from pymdownx.slugs import slugify

    path = folder / "mkdocs.yml"
    path.write_text(json.dumps(config), "utf-8")
    loaded = load_config(str(path))
    loaded.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    make(loaded)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Render the site that _quarto.yml describes, without Quarto."
    )
    sys.path.insert(0, str(ROOT))  # use the modules of this checkout, not an installed package
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    parser.add_argument(
        "--out",
        type=Path,
        help="the folder to write (default: project.output-dir of _quarto.yml)",
    )
    try:
        out, count = render(ROOT, parser.parse_args().out)
    except ConfigurationError as fault:
        sys.exit(str(fault))
    print(f"{count} pages in {out}: python -m http.server -d {out}")


if __name__ == "__main__":
    main()
