"""The image and its compose file, as an operator runs them: built, limited, scraped, hurt, stopped and started again.

    make test-image                                                      on this machine's processor
    DOCKER_DEFAULT_PLATFORM=linux/arm/v7 BASE_IMAGE=… make test-image   emulated, where binfmt is set up; half an hour

BASE_IMAGE is taken from the environment, as compose takes it. The memory limit is 200 MB, that of the 512 MB boards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import Recording
from tests.image.box import EMULATED, PLATFORM, ROOT, Box, docker, started, until
from tests.integration.running import free_port
from tests.words import words

pytestmark = pytest.mark.image
PROJECT = "thimble-test" + PLATFORM.replace("/", "")
IMAGE = f"{PROJECT}:latest"
BAKED = f"{PROJECT}:baked"
POST_WITHIN = r"""
import json, urllib.request
head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
body = head + open("/demo.flac", "rb").read() + b"\r\n--x--\r\n"
headers = {"Content-Type": "multipart/form-data; boundary=x"}
request = urllib.request.Request("http://127.0.0.1:8000/transcribe", body, headers)
print(json.load(urllib.request.urlopen(request))["text"])
"""
"""For a container that has no network: posts from inside."""
only_native = pytest.mark.skipif(EMULATED, reason="qemu's own memory and pace would be measured")


class Compose:
    """The project's compose file with the test's environment."""

    def __init__(self, **environment: str) -> None:
        self.port = free_port()
        if EMULATED:  # fetching is three processes: qemu's own memory for each would not fit under the limit
            environment["MODEL"] = "tiny.en"
        own = {"THIMBLE_IMAGE": IMAGE, "THIMBLE_PUBLISH": f"127.0.0.1:{self.port}", "THIMBLE_MEMORY": "200m"}
        kept = {n: v for n, v in os.environ.items() if not n.startswith("THIMBLE_") and n != "MODEL"}
        self.environment = kept | own | environment

    def __call__(self, *arguments: str) -> str:
        # Not the .env of whoever runs the tests.
        own = ("--project-name", PROJECT, "--file", "docker-compose.yml", "--env-file", os.devnull)
        command = ["docker", "compose", *own, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.fail("no docker with compose v2 here (Debian 13: docker.io and docker-compose)")
    run = Compose(PROMETHEUS_IMAGE="thimble-prometheus:test", PROMETHEUS_PUBLISH=f"127.0.0.1:{free_port()}")
    run("--profile", "metrics", "down", "--volumes")
    run("build", "thimble")
    yield run
    run("--profile", "metrics", "down", "--volumes")


@pytest.fixture(scope="module")
def box(compose: Compose) -> Iterator[Box]:
    """The composed service, its model fetched at this first start (emulated: baked in)."""
    compose("up", "--detach", "--no-build", "thimble")
    running = Box(compose("ps", "--quiet", "thimble"), compose.port)
    running.wait_until_ready()
    yield running
    running.client.close()


def said(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return words(response.json()["text"])


def spooled(box: Box) -> list[str]:
    return box.run("find", "/data/spool", "-type", "f", "-not", "-name", "*.lock").splitlines()


def test_a_recording_becomes_its_text_under_200_mb(box: Box, recordings: dict[str, Recording]) -> None:
    assert said(box.post(recordings["demo"].path)) == words(recordings["demo"].text)
    assert box.metric("thimble_memory_limit_bytes") == 200 << 20 == int(box.state(".HostConfig.Memory"))
    assert box.state(".HostConfig.MemorySwap") == box.state(".HostConfig.Memory")
    assert box.state(".State.OOMKilled") == "false"
    assert box.metric("thimble_memory_oom_kills_total") == 0


def test_the_image_is_for_the_processor_asked_for_and_has_no_compiler(box: Box) -> None:
    machine = {"linux/arm/v7": "armv7l", "linux/arm64": "aarch64"}.get(PLATFORM)
    assert box.run("uname", "-m") == (machine or os.uname().machine)
    assert box.run("bash", "-c", "type -p gcc cc clang make", check=False) == ""


def test_the_root_is_read_only_and_nobody_in_it_is_root(box: Box) -> None:
    assert box.run("id", "-u") == "10001"
    assert box.state(".HostConfig.ReadonlyRootfs") == "true"
    assert box.run("bash", "-c", "touch /opt/x /x /etc/x 2>&1 | grep -c Read-only") == "3"
    status = box.run("cat", f"/proc/{box.worker_pid()}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"


def test_docker_finds_it_healthy(box: Box) -> None:
    until(lambda: box.state(".State.Health.Status") == "healthy", "healthy")


def test_settings_reach_the_service_only_where_they_are_set(box: Box) -> None:
    names = {line.partition("=")[0] for line in box.run("env").splitlines() if line.startswith("THIMBLE_")}
    assert names == {"THIMBLE_DATA_DIR", "THIMBLE_HOST", "THIMBLE_MODEL"}


def test_a_worker_killed_in_a_job_costs_no_job(box: Box, recordings: dict[str, Recording]) -> None:
    answer: list[httpx.Response] = []
    poster = threading.Thread(target=lambda: answer.append(box.post(recordings["long"].path)))
    jobs = len(box.lines("job"))
    poster.start()
    until(lambda: spooled(box), "the recording is spooled")
    box.run("bash", "-c", f"kill -9 {box.worker_pid()}")
    assert box.answers("/healthz", 200)
    poster.join()
    assert len(said(answer[0])) > 200
    assert box.lines("job")[jobs]["attempts"] == 2
    assert box.metric('thimble_worker_restarts_total{reason="killed"}') == 1


def test_a_real_prometheus_scrapes_it(compose: Compose, box: Box) -> None:
    """Debian's Prometheus under the name that the compose file gives; Grafana's image is not asked for here."""
    base = ("--build-arg", f"BASE_IMAGE={os.environ['BASE_IMAGE']}") if "BASE_IMAGE" in os.environ else ()
    docker("build", *base, "--tag", "thimble-prometheus:test", "--file", "tests/image/prometheus.Dockerfile", "tests/image")
    compose("--profile", "metrics", "up", "--detach", "--no-build", "prometheus")
    api = f"http://{compose.environment['PROMETHEUS_PUBLISH']}/api/v1/query"

    def value(query: str) -> str:
        try:
            found = httpx.get(api, params={"query": query}).json()["data"]["result"]
        except httpx.TransportError:
            return ""
        return str(found[0]["value"][1]) if found else ""

    until(lambda: value('up{job="thimble"}') == "1", "a scrape")
    assert value("thimble_ready") == "1"
    assert float(value("thimble_memory_limit_bytes")) == 200 << 20
    compose("--profile", "metrics", "rm", "--stop", "--force", "prometheus")


def test_a_stop_in_a_job_drains_and_a_start_serves_again(compose: Compose, box: Box, recordings: dict[str, Recording]) -> None:
    answer: list[httpx.Response] = []
    poster = threading.Thread(target=lambda: answer.append(box.post(recordings["demo"].path)))
    jobs = len(box.lines("job"))
    poster.start()
    until(lambda: spooled(box), "the recording is spooled")
    assert len(box.lines("job")) == jobs
    compose("stop", "thimble")  # within the file's stop_grace_period, or Docker kills it: 137
    poster.join()
    if not EMULATED:  # a window takes longer than the drain time there: its client was told `shutting_down`
        assert said(answer[0]) == words(recordings["demo"].text)
    assert answer[0].status_code in (200, 503)
    assert box.state(".State.ExitCode") == "0"
    assert len(box.lines("job")) == jobs + 1
    compose("start", "thimble")
    box.wait_until_ready()
    assert spooled(box) == []
    assert said(box.post(recordings["demo"].path)) == words(recordings["demo"].text)


@only_native
def test_what_is_left_in_the_volume(box: Box) -> None:
    until(lambda: not spooled(box), "the spool is empty")
    assert box.run("ls", "-A", "/data").split() == ["models", "spool", "spool.lock"]
    assert box.run("ls", "-A", "/data/models").split() == ["tiny.en-int8"]


@pytest.fixture(scope="module")
def baked() -> str:
    """The image with its model in it."""
    base = ("--build-arg", f"BASE_IMAGE={os.environ['BASE_IMAGE']}") if "BASE_IMAGE" in os.environ else ()
    docker("build", *base, "--build-arg", "MODEL=tiny.en", "--tag", BAKED, ".")
    return BAKED


@only_native
def test_the_memory_limit_kills_the_worker_and_the_front_end_says_so(baked: str, recordings: dict[str, Recording]) -> None:
    with started(baked, "--memory", "70m", "--memory-swap", "70m") as box:
        box.wait_until_ready()
        answer = box.post(recordings["demo"].path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "out_of_memory")
        assert "the memory limit of 70 MiB is used up" in answer.json()["error"]["message"]
        assert box.lines("job")[-1]["code"] == "out_of_memory"
        assert "the memory limit of 70 MiB is used up" in box.lines("worker died")[-1]["cause"]
        until(lambda: box.metric('thimble_worker_restarts_total{reason="out_of_memory"}') >= 2, "counted")
        assert box.metric("thimble_memory_oom_kills_total") >= 2
        assert box.answers("/healthz", 200)
        assert (box.state(".State.Status"), box.state(".RestartCount")) == ("running", "0")


def test_a_full_volume_is_said_and_passes(baked: str, recordings: dict[str, Recording]) -> None:
    volume = "type=volume,destination=/data,volume-driver=local,volume-opt=type=tmpfs,volume-opt=device=tmpfs"
    with started(baked, "--mount", f'{volume},"volume-opt=o=size=2m,uid=10001,gid=10001"') as box:
        box.wait_until_ready()
        answer = box.post(bytes(4 << 20))
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "no_temp_space")
        assert spooled(box) == []
        assert said(box.post(recordings["demo"].path)) == words(recordings["demo"].text)


def test_a_baked_in_model_needs_no_network_and_no_room_in_the_volume(baked: str, recordings: dict[str, Recording]) -> None:
    with started(baked, "--network", "none", "--volume", f"{recordings['demo'].path}:/demo.flac:ro") as box:
        until(lambda: box.lines("worker ready"), f"ready: {box.log()}")
        assert words(box.run("python3", "-c", POST_WITHIN)) == words(recordings["demo"].text)
        assert box.run("find", "/data", "-type", "f").split() == ["/data/spool.lock"]
