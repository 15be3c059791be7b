"""The sources of the site: build/mkdocs.yml, and in build/docs its pages and what they link to.

The files are laid out as in the repository, so links that work on GitHub also work on the site.
``make docs`` runs this module, and then builds the site. The site also has ``llms.txt``, a list of
its pages for language models, with their Markdown: https://llmstxt.org. If GitHub builds the site,
it links to the repository.
"""

import os
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
    """Return a page without its code, because brackets in code are not links."""
    return re.sub(r"^ *```.*?^ *```$|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links_of(page: Path) -> list[tuple[Path, str]]:
    """Return a page's links within the repository: their files and anchors, empty for none."""
    found = _LINK.findall(text_of(page))
    return [
        ((page.parent / target).resolve() if target else page, anchor) for target, anchor in found
    ]


def pages() -> list[Path]:
    """Return the pages of the navigation, and all pages that they lead to."""
    navigation = yaml.safe_load(CONFIGURATION.read_text())["nav"]
    known = [ROOT / path for path in _paths(navigation)]
    for page in known:  # the list grows during the loop
        known += sorted(
            {target for target, _ in links_of(page) if target.suffix == ".md"} - set(known)
        )
    return known


def _paths(navigation: list[dict[str, object]]) -> list[str]:
    entries = [entry for section in navigation for entry in section.values()]
    return [
        path for entry in entries for path in ([entry] if isinstance(entry, str) else _paths(entry))
    ]


def llms_txt() -> str:
    """Return the list of all pages, each with its title and its first sentence."""
    lines = ["# ClusterEnv", "", f"> {_first_sentence(ROOT / 'README.md')}", "", "## Pages", ""]
    for page in pages():
        path = page.relative_to(ROOT)
        sentence = _first_sentence(page)  # empty for a table
        lines.append(f"- [{title_of(page)}]({path})" + (f": {sentence}" if sentence else ""))
    return "\n".join(lines) + "\n"


def title_of(page: Path) -> str:
    """Return a page's heading, or the file's name if it has none, as for a table from a command."""
    heading = re.search("^# (.*)", page.read_text(), re.MULTILINE)
    return heading[1] if heading else page.name


def _first_sentence(page: Path) -> str:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # replace each link by its text
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
    first = next((each for each in paragraphs if re.match(r"[\w`]", each)), "")
    return re.match(r".*?[.:](?= |$)|.*", first)[0]


def repository() -> str:
    """Return the repository's address for mkdocs.yml, or an empty text outside GitHub."""
    name = os.environ.get("GITHUB_REPOSITORY")
    server = os.environ.get("GITHUB_SERVER_URL")
    return f"repo_url: {server}/{name}\nrepo_name: {name}\n" if name else ""


if __name__ == "__main__":
    shutil.rmtree(SOURCES, ignore_errors=True)
    for page in pages():
        for file in {page, *(target for target, _ in links_of(page))}:
            copy = SOURCES / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    (SOURCES / "llms.txt").write_text(llms_txt())
    (BUILD / CONFIGURATION.name).write_text(CONFIGURATION.read_text() + repository())
