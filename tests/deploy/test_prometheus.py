"""deploy/'s Prometheus and Grafana files, asked of a real Prometheus that scrapes a real service: every query, every alert."""

from __future__ import annotations

import re
from typing import Any

import pytest

from service.settings import Settings
from tests.deploy.scene import (
    ALERTS,
    DASHBOARD,
    DEPLOY,
    QUERIES,
    Scene,
)

EMPTY_WHILE_ALL_IS_WELL = {"Alerts 7A": "no alert fires"}
"""Dashboard queries that answer nothing then, and must in trouble. Those on `thimble_memory_*` are known by their names."""
TROUBLE = {
    "ThimbleDown": "board",
    "ThimbleNotReady": "made",
    "ThimbleWorkerRestarting": "board",
    "ThimbleOutOfMemory": "made",
    "ThimbleQueueFull": "board",
    "ThimbleNoJobDone": "made",
    "ThimbleMemoryNearLimit": "made",
    "ThimbleThrashing": "made",
    "ThimbleWaitsForStorage": "made",
}
"""Where each alert's condition comes true. How long it must stay so is promtool's to test: alerts_test.yml."""

OTHERS = {"up", "ALERTS"}
"""Series of Prometheus's own."""


def names(expression: str) -> set[str]:
    """Metrics that an expression asks for."""
    return set(re.findall(r"\b(?:thimble|process)_\w+|\b(?:up|ALERTS)\b", re.sub(r'"[^"]*"', "", expression)))


def samples(page: str) -> dict[str, set[frozenset[tuple[str, str]]]]:
    """Label sets by name of series."""
    found: dict[str, set[frozenset[tuple[str, str]]]] = {}
    for name, labels in re.findall(r"^([a-z]\w*)(?:\{(.*)\})? \S+$", page, re.MULTILINE):
        found.setdefault(name, set()).add(frozenset(re.findall(r'(\w+)="([^"]*)"', labels)))
    return found


def absent(expression: str, page: str) -> set[str]:
    """Metrics of an expression that a page has no sample of."""
    return names(expression) - set(samples(page)) - OTHERS


@pytest.mark.parametrize("name", QUERIES)
def test_a_dashboard_query_returns_data(name: str, scene: Scene) -> None:
    expression, _ = QUERIES[name]
    lacking = absent(expression, scene.pages["board"])
    # No control group, or one without a limit: the board must show nothing, and the made page, which has both, something.
    assert all(metric.startswith("thimble_memory_") for metric in lacking)
    if lacking:
        assert scene.shown(name, "board") == []
        assert scene.shown(name, "made")
    elif name in EMPTY_WHILE_ALL_IS_WELL:
        assert scene.shown(name, "board") == []
        assert scene.shown(name, "made", trouble=True)
    else:
        assert scene.shown(name, "board")


def test_the_board_has_a_limit_to_show(scene: Scene) -> None:
    """Whether the panels about a limit were seen with a real one."""
    if lacking := absent("thimble_memory_limit_bytes thimble_memory_used_bytes", scene.pages["board"]):
        lacking_words = ", ".join(sorted(lacking))
        pytest.skip(
            f"this host's control group gives no {lacking_words}: those panels were seen empty, and full on the made page"
        )
    assert scene.shown("Memory limit used 5A", "board")


@pytest.mark.parametrize("name", [name for name, (expression, _) in QUERIES.items() if "_seconds_count{" in expression])
def test_the_first_job_of_a_service_shows_and_so_does_the_second(name: str, scene: Scene) -> None:
    """Series of layers and stages begin with the first job, which no `rate` or `increase` sees: one side of `or` is for it."""
    fresh, rise = scene.filled(QUERIES[name][0], "board").split(" or ")
    assert scene.asked(fresh, scene.began, scene.first)
    assert scene.asked(rise, scene.began, scene.first) == []
    assert scene.asked(rise, scene.first, scene.well)


@pytest.mark.parametrize(("title", "label", "value"), [("Restarts", "reason", "killed"), ("Refusals", "code", "queue_full")])
def test_what_goes_wrong_rises(title: str, label: str, value: str, scene: Scene) -> None:
    (name,) = (name for name in QUERIES if name.startswith(title))
    for trouble in (False, True):
        (series,) = (row for row in scene.shown(name, "board", trouble) if row["metric"][label] == value)
        assert (max(float(number) for _, number in series["values"]) > 0) is trouble


def test_the_variable_offers_both_boards(scene: Scene) -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
    found = scene.prometheus.get(f"label/{label}/values", **{"match[]": selector})
    assert set(found) == set(scene.instances.values())


def rule(scene: Scene, name: str) -> dict[str, Any]:
    (group,) = scene.prometheus.get("rules")["groups"]
    (found,) = (rule for rule in group["rules"] if rule["name"] == name)
    assert found["health"] == "ok", found
    return found


@pytest.mark.parametrize("name", ALERTS)
def test_an_alerts_expression_is_empty_while_all_is_well_and_answers_in_trouble(name: str, scene: Scene) -> None:
    expression = rule(scene, name)["query"]
    assert scene.asked(expression, scene.began, scene.well, instant=True) == []
    troubled = {row["metric"]["instance"] for row in scene.asked(expression, scene.well, scene.ended)}
    assert scene.instances[TROUBLE[name]] in troubled


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_where_and_what_to_do(name: str, scene: Scene) -> None:
    (alert, *_) = rule(scene, name)["alerts"]  # pending or firing since
    assert set(alert["labels"]) == {"alertname", "instance", "job", "severity"}
    assert alert["labels"]["severity"] in ("critical", "warning")
    for text in (alert["annotations"]["summary"], alert["annotations"]["description"]):
        assert "<" not in text  # what a template's error or an absent label would leave
    assert alert["labels"]["instance"] in alert["annotations"]["summary"]


def test_no_job_done_waits_as_long_as_a_job_may_take(scene: Scene) -> None:
    assert rule(scene, "ThimbleNoJobDone")["duration"] == Settings.model_fields["job_deadline_seconds"].default


def test_every_metric_and_label_value_asked_for_is_on_the_page(scene: Scene) -> None:
    """A misspelt value in `reason!="max_jobs"` would return data all the same."""
    expressions = [expression for expression, _ in QUERIES.values()] + [rule(scene, name)["query"] for name in ALERTS]
    known = set(samples(scene.pages["board"])) | set(re.findall(r"^# TYPE (\w+) ", scene.pages["board"], re.MULTILINE)) | OTHERS
    assert {name for expression in expressions for name in names(expression)} - known == set()
    pages = "".join(scene.pages.values())
    pairs = {pair for text in expressions for pair in re.findall(r'(\w+)!?="(\w+)"', text)}
    pairs -= {("job", "thimble"), ("alertstate", "firing")}  # prometheus.yml's and Prometheus's own
    assert {pair for pair in pairs if f'{pair[0]}="{pair[1]}"' not in pages} == set()


def test_promtools_series_are_those_of_the_page(scene: Scene) -> None:
    pages = [samples(page) for page in scene.pages.values()]
    found = re.findall(r"series: (\w+)\{(.*)\}$", (DEPLOY / "alerts_test.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) > 40
    for name, text in found:
        labels = frozenset(pair for pair in re.findall(r'(\w+)="([^"]*)"', text) if pair[0] not in ("job", "instance"))
        assert name == "up" or any(labels in page.get(name, ()) for page in pages), (name, text)
