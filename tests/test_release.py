"""The workflow that publishes, and the package's page."""

import os
import re
import shutil
import subprocess
import tomllib

import yaml

from .scripts import ROOT

GITHUB = {
    "GITHUB_SERVER_URL": "https://github.example",
    "GITHUB_REPOSITORY": "us/ours",
    "GITHUB_REF_NAME": "v1.2.3",
}


def test_a_release_passes_the_tests_first_and_its_page_links_to_the_repository(tmp_path):
    jobs = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())["jobs"]
    assert jobs["publish"]["needs"] == "test" and jobs["test"]["uses"].endswith("/test.yml")
    for name in "README.md", "pyproject.toml":
        shutil.copy(ROOT / name, tmp_path)
    runs = [step["run"] for step in jobs["publish"]["steps"] if "sed -i" in step.get("run", "")]
    for run in runs:
        environment = {**os.environ, **GITHUB}
        subprocess.run(["bash", "-e", "-c", run], cwd=tmp_path, env=environment, check=True)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == "https://github.example/us/ours"
    page = (tmp_path / "README.md").read_text()
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", page)
    ours = [(picture, link) for picture, link in links if "://github.example" in link]
    assert len(links) > 30 and all(re.match("https://|#", link) for _, link in links)
    for picture, link in ours:
        kind = "raw" if picture else "blob"
        path = link.removeprefix(f"https://github.example/us/ours/{kind}/v1.2.3/")
        assert (ROOT / path.partition("#")[0]).exists(), link
    assert {picture for picture, _ in ours} == {"", "!"}
