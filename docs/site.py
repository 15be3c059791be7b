"""The sources of the site, in build: mkdocs.yml, and in build/docs its pages and what they link to,
laid out as they are here.

So the links that work on GitHub work on the site. ``make docs`` calls this, and then builds.
"""

import re
import shutil
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "docs" / "mkdocs.yml"
BUILD = ROOT / "build"
SOURCES = BUILD / "docs"
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def text_of(page: Path) -> str:
    """Return a page without its code, in which brackets are no links."""
    return re.sub(r"^ *```.*?^ *```$|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links_of(page: Path) -> list[tuple[Path, str]]:
    """Return the links of a page within the repository: the file that each leads to, and the anchor
    in it, if any.
    """
    found = _LINK.findall(text_of(page))
    return [
        ((page.parent / target).resolve() if target else page, anchor) for target, anchor in found
    ]


def pages() -> list[Path]:
    """Return the pages of the navigation, and those that they lead to."""
    navigation = yaml.safe_load(CONFIGURATION.read_text())["nav"]
    known = [ROOT / path for path in _paths(navigation)]
    for page in known:  # which grows meanwhile
        known += sorted(
            {target for target, _ in links_of(page) if target.suffix == ".md"} - set(known)
        )
    return known


def _paths(navigation: list[dict[str, object]]) -> list[str]:
    entries = [entry for section in navigation for entry in section.values()]
    return [
        path for entry in entries for path in ([entry] if isinstance(entry, str) else _paths(entry))
    ]


if __name__ == "__main__":
    shutil.rmtree(SOURCES, ignore_errors=True)
    for page in pages():
        for file in {page, *(target for target, _ in links_of(page))}:
            copy = SOURCES / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    shutil.copy(CONFIGURATION, BUILD)
