"""What the documentation must hold: every setting, metric, error code, command and dependency."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from engine import errors as engine_errors
from engine.cli import _parser
from service.metrics import Metrics, Sources
from service.protocol import Ready
from service.settings import PREFIX, Settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def engine_codes() -> set[str]:
    """Codes of the tree's leaves."""
    leaves, branches = set(), [engine_errors.EngineError]
    while branches:
        branch = branches.pop()
        children = branch.__subclasses__()
        branches += children
        if not children:
            leaves.add(branch.code)
    return leaves


def service_codes() -> set[str]:
    sources = "".join(path.read_text() for path in (ROOT / "service").rglob("*.py"))
    return set(re.findall(r'ServiceError\(\s*\d{3}, "(\w+)"', sources)) | {
        "worker_died",
        "out_of_memory",
        "unsupported_response_format",
        "unsupported_task",
        "not_found",
        "method_not_allowed",
        "internal_error",
    }


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_stands_in_the_readme_with_its_default(name: str) -> None:
    row = re.search(rf"^\| `{PREFIX}{name.upper()}` \| ([^|]*) \|", README, re.MULTILINE)
    assert row, f"no row for {PREFIX}{name.upper()}"
    default = Settings.model_fields[name].default
    if default is not None and name != "data_dir":
        assert f"`{default:g}`" in row[1] if isinstance(default, float) else f"`{default}`" in row[1]
    assert Settings.model_fields[name].description


def test_compose_passes_every_setting_and_the_example_names_every_variable() -> None:
    """But for those that the container itself decides: where its data are, and what it listens on."""
    compose, example = (ROOT / "docker-compose.yml").read_text(), (ROOT / ".env.example").read_text()
    inside = {PREFIX + name.upper() for name in ("data_dir", "host", "port")}
    settings = {PREFIX + name.upper() for name in Settings.model_fields} - inside
    passed = set(re.findall(r"^      - (THIMBLE_\w+)", compose, re.MULTILINE))
    assert passed == settings
    overrides = [path.read_text() for path in (ROOT / "deploy").glob("compose.*.yml")]
    assert len(overrides) == 3
    variables = settings | {name for text in (compose, *overrides) for name in re.findall(r"\$\{(\w+)", text)}
    assert {name for name in variables if f"#{name}=" not in example} == set()
    for name, default in re.findall(r"\$\{(\w+):-([^${}]+)\}", compose):
        nothing_baked_in = name == "MODEL"  # its default in THIMBLE_MODEL's is the name of what is fetched
        assert nothing_baked_in or f"#{name}={default}\n" in example, name


def test_every_error_code_stands_in_the_readme() -> None:
    codes = service_codes() | engine_codes()
    codes -= {
        "checkpoint_invalid",
        "not_enough_disk",
        "target_not_a_model",
        "model_not_found",
        "measuring_unavailable",
        "name_taken",
    }  # of the command line alone, which says them in words
    assert len(codes) > 20
    assert {code for code in codes if f"`{code}`" not in README} == set()


def test_every_metric_stands_in_the_readme() -> None:
    metrics = Metrics(Sources(lambda: 0, lambda: True, lambda: 1, None), 8)
    metrics.worker_ready(Ready(1, "int8", "reference", {"self": 1}))
    names = set(re.findall(r"^# TYPE (thimble_\w+) ", metrics.page().decode(), re.MULTILINE))
    assert len(names) > 12
    assert {name for name in names if f"`{name}`" not in README} == set()


def test_every_command_stands_in_the_readme() -> None:
    (commands,) = (action for action in _parser()._actions if action.dest == "command")
    assert {name for name in commands.choices if f"thimble {name}" not in README} == set()


def test_every_dependency_has_its_reason_in_contributing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.match(r"[\w-]+", requirement)[0] for group in groups for requirement in group}
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {name for name in names if f"| {name} |" not in contributing} == set()


def test_the_two_commands_stand_at_the_top_of_the_readme() -> None:
    top = README.split("\n## ")[0] + README.split("\n## ")[1]
    assert "make demo" in top
    assert "make test" in top


def test_every_link_within_the_project_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]
    links = {
        (page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    }
    assert len(links) > 3
    assert {f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()} == set()


def test_nothing_committed_names_a_registry_or_this_machine() -> None:
    git = shutil.which("git")
    if not git or not (ROOT / ".git").exists():
        pytest.skip("no checkout to ask what is committed")
    listed = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [ROOT / name for name in listed if (ROOT / name).exists()]
    patterns = re.compile(r"pypi\.org|pythonhosted|deb\.debian\.org|registry\.npmjs|/work/|/root/")
    found = {str(p.relative_to(ROOT)) for p in files if patterns.search(p.read_text(encoding="utf-8", errors="ignore"))}
    assert found - {"tests/test_docs.py"} == set()
