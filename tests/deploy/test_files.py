"""deploy/'s Prometheus and Grafana files by themselves."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.deploy.scene import ALERTS, DASHBOARD, DEPLOY, HANG_SECONDS, PANELS, QUERIES, VARIABLES, program
from tests.deploy.test_prometheus import TROUBLE


@pytest.mark.parametrize("command", ["check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"])
def test_promtool_finds_no_fault(command: str) -> None:
    checked = subprocess.run(
        [program("promtool"), *command.split()], cwd=DEPLOY, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_is_seen_to_fire_by_promtool_and_here() -> None:
    fired = re.findall(r"""labels: '\{alertname="(\w+)""", (DEPLOY / "alerts_test.yml").read_text(encoding="utf-8"))
    assert set(fired) == set(ALERTS) == set(TROUBLE)
    assert len(ALERTS) == len(TROUBLE)


def test_every_panel_has_a_title_a_unit_and_a_place_of_its_own() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place, title = panel["gridPos"], panel["title"]
        assert title
        assert place["x"] + place["w"] <= 24, title
        for cell in (
            (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{title} lies on {taken[cell]}"
            taken[cell] = title
    for panel in PANELS:
        if panel["type"] != "text":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["description"], panel["title"]
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references) > 0, panel["title"]
    assert {name for expression, _ in QUERIES.values() for name in re.findall(r"\$\w+", expression)} == {
        "$instance",
        *VARIABLES,
    }


def test_grafana_is_told_of_one_datasource_and_finds_the_dashboard() -> None:
    datasource = (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    (uid,) = re.findall(r"^ +uid: (\S+)", datasource, re.MULTILINE)
    assert set(re.findall(r'"uid": "([^"]+)"\}', json.dumps(DASHBOARD))) == {uid}
    (interval,) = re.findall(r"^ +timeInterval: (\S+)", datasource, re.MULTILINE)
    assert f"scrape_interval: {interval} " in (DEPLOY / "prometheus.yml").read_text(encoding="utf-8")
