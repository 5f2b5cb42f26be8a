"""What alerts, dashboard and scalers ask for: a running server has it, and a real Prometheus answers it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlencode

import psutil
import pytest
import yaml

from cosytriton_client import Client, Voice
from cosytriton_ensemble.metrics import MEMORY, read_metric
from cosytriton_ensemble.server import free_ports

FILES = Path(__file__).parents[2] / "k8s" / "cosytriton" / "files"
DASHBOARD = json.loads((FILES / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Where the page with the panels' data is to be written; `docs` has a picture of it.
PAGE = os.environ.get("COSYTRITON_PANELS_PAGE")
SECONDS = 60 if PAGE else 20  # of load
# Labels that Prometheus gives to what it scrapes.
OF_TARGETS = {"namespace", "job", "instance", "pod", "rollouts_pod_template_hash"}
SCALERS = (
    ("autoscaling.kind=hpa",),
    ("autoscaling.kind=keda", "autoscaling.prometheus=http://prometheus:9090", "metrics.monitor=PodMonitor"),
    ("workload=Rollout", "rollout.prometheus=http://prometheus:9090", "metrics.monitor=PodMonitor"),
)
GRAFANA = ("@grafana/grafana-foundation-sdk@0.0.21", "typescript@5.9.3")
SELECTOR = re.compile(r"\b((?:nv|cosytriton)_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
LINE = re.compile(r"^(\w+)(?:\{(.*)\})? \S+$")
LABEL = re.compile(r'(\w+)="([^"]*)"')

Series = dict[str, list[dict[str, str]]]


def needs_prometheus(test: Any) -> Any:
    there = shutil.which("prometheus")
    skip = pytest.mark.skipif(
        not there, reason="prometheus is not installed (Debian: apt-get install prometheus)"
    )
    return pytest.mark.chart(skip(test))


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that scrapes the server each second, with the chart's rules."""

    url: str

    def ask(self, path: str, **words: Any) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urlencode(words)}", timeout=30) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]


def of_the_rules() -> list[str]:
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def of_the_dashboard() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def strings(value: Any) -> Iterator[str]:
    """Every string in a manifest."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def unknown(query: str, series: Series) -> list[str]:
    """What a query names and the endpoint does not have."""
    problems, labels = [], set(OF_TARGETS)
    for name, matchers in SELECTOR.findall(query):
        found = series.get(name, [])
        labels |= set().union(*found)
        if not found:
            problems.append(name)
        for label, sign, value in MATCHER.findall(matchers):
            if label in OF_TARGETS or not found:
                continue
            values = {one.get(label) for one in found}
            wanted = set(value.split("|")) if sign.endswith("~") else {value}
            problems += [f"{name}{{{label}={missing!r}}}" for missing in sorted(wanted - values)]
    grouped = {label.strip() for group in GROUPING.findall(query) for label in group.split(",")}
    return problems + sorted(grouped - labels)


def read_series(url: str) -> Series:
    with urllib.request.urlopen(url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    series: Series = {}
    for name, labels in (match.groups() for line in lines if (match := LINE.match(line))):
        series.setdefault(name, []).append(dict(LABEL.findall(labels or "")))
    return series


def put_load(url: str, voice: Voice, seconds: float) -> int:
    """Two listeners and one who waits for the whole; how many streams were heard."""
    end = time.monotonic() + seconds

    def speak(number: int) -> int:
        count = 0
        with Client(url) as client:
            while time.monotonic() < end:
                text = f"This is voice number five. {'Please wait for your server. ' * number}"
                if number:
                    count += bool(list(client.stream(text, voice, seed=count)))
                else:
                    client.synthesize(text, voice, seed=count)
                    client.stream(text, voice).close()
        return count

    with ThreadPoolExecutor(3) as pool:
        return sum(pool.map(speak, range(3)))


def metrics_url(server: Any) -> str:
    return f"http://localhost:{server.metrics_port}/metrics"


def test_what_is_asked_for_is_on_the_endpoint(server: Any, voice: Voice, render: Callable[..., Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(put_load, server.grpc_url, voice, 1.0)
        time.sleep(1.0)
        series = read_series(metrics_url(server))
        assert load.result() > 0
    kinds = {"HorizontalPodAutoscaler", "ScaledObject", "AnalysisTemplate"}
    manifests = [
        m
        for settings in SCALERS
        for m in render(*settings, "metrics.monitor=PodMonitor")
        if m["kind"] in kinds
    ]
    assert {manifest["kind"] for manifest in manifests} == kinds
    asked = [text for manifest in manifests for text in strings(manifest["spec"])]
    asked = [text for text in asked if SELECTOR.search(text)]
    assert len(asked) >= 6
    for query in (*of_the_rules(), *of_the_dashboard(), *asked):
        assert unknown(query, series) == [], query


@pytest.mark.chart
def test_the_memory_is_that_of_the_server_and_its_models(server: Any, voice: Voice) -> None:
    """As psutil sees it from outside. The server looks every ten seconds, if anything happens then."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert len(processes) > 5

    def agree() -> bool:
        put_load(server.grpc_url, voice, 0.1)
        resident = sum(process.memory_info().rss for process in processes)
        published = read_metric(f"http://localhost:{server.metrics_port}", MEMORY)
        return published == pytest.approx(resident, rel=0.1)

    wait_for(agree, 30)


def test_what_is_not_there_is_noticed() -> None:
    series: Series = {"cosytriton_first_audio_seconds_count": [{"model": "tts"}, {"model": "tts_stream"}]}
    name = "cosytriton_first_audio_seconds_count"
    assert unknown(f'sum by (job, model) ({name}{{model=~"tts|tts_stream", namespace="x"}})', series) == []
    assert unknown(f"{name}s", series) == [f"{name}s"]
    assert unknown(f'{name}{{model="tts_streams"}}', series) == [f"{name}{{model='tts_streams'}}"]
    assert unknown(f'{name}{{modle="tts"}}', series) == [f"{name}{{modle='tts'}}"]
    assert unknown(f"sum by (modle) ({name})", series) == ["modle"]


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What TypeScript says of a dashboard's JSON by Grafana's types; they are fetched once."""
    if not (shutil.which("npm") and shutil.which("node")):
        pytest.skip("Node is not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cosytriton" / "grafana"
    if not (cache / "node_modules" / ".package-lock.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run([*npm, "--prefix", str(cache), *GRAFANA], check=True)
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "node_modules").symlink_to(cache / "node_modules")
    types = Path(__file__).with_name("dashboard.ts").read_text()
    tsc = ["node", "node_modules/typescript/bin/tsc", "--noEmit", "--strict", "--skipLibCheck"]
    tsc += ["--module", "esnext", "--moduleResolution", "bundler", "dashboard.ts"]

    def compiled(dashboard: str) -> str:
        (folder / "dashboard.ts").write_text(f"{types}export const dashboard: Board = {dashboard};")
        return subprocess.run(tsc, cwd=folder, capture_output=True, text=True, check=False).stdout

    return compiled


@pytest.mark.chart
@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("", ""),
        ('"unit": "s"', '"unit": 5'),
        ('"mode": "absolute"', '"mode": "absolut"'),
        ('"expr"', '"expression"'),
        ('"gridPos"', '"gridpos"'),
        ('"graphTooltip": 1', '"graphTooltip": 9'),
    ],
)
def test_the_dashboard_has_the_types_that_grafana_reads(
    complaints: Callable[[str], str], text: str, broken: str
) -> None:
    dashboard = (FILES / "dashboard.json").read_text()
    assert text in dashboard
    said = complaints(dashboard.replace(text, broken, 1) if text else dashboard)
    assert bool(said) == bool(broken), said


def test_the_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@contextmanager
def scraping(metrics_port: int, folder: Path) -> Iterator[Prometheus]:
    target = {"targets": [f"localhost:{metrics_port}"], "labels": {"namespace": "speech"}}
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(FILES / "alerts.yaml")],
        "scrape_configs": [{"job_name": "tts", "static_configs": [target]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    (port,) = free_ports(1)
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process = subprocess.Popen(command)
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: _answers(found), 60)
        yield found
    finally:
        process.terminate()
        process.wait(30)


def wait_for(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _answers(prometheus: Prometheus) -> bool:
    try:
        return bool(prometheus.ask("query", query="cosytriton_speech_lm_slots")["result"])
    except OSError:
        return False


@needs_prometheus
def test_every_panel_has_data_in_prometheus(server: Any, voice: Voice, tmp_path: Path) -> None:
    with scraping(server.metrics_port, tmp_path) as prometheus:
        before, begin = _count(prometheus), time.time()
        heard = put_load(server.grpc_url, voice, SECONDS)
        time.sleep(3)
        assert _count(prometheus) - before == heard
        curves = [
            (panel, target["legendFormat"], _curves(prometheus, target["expr"], begin, time.time()))
            for panel in PANELS
            for target in panel["targets"]
        ]
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    for panel, legend, found in curves:
        assert any(math.isfinite(value) for _, _, values in found for value in values), (
            panel["title"],
            legend,
        )
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["state"] for rule in rules if rule["type"] == "alerting"} <= {"inactive", "pending"}
    if PAGE:
        _draw(curves, Path(PAGE))


@needs_prometheus
def test_a_language_model_that_hangs_is_seen(
    serve: Callable[..., AbstractContextManager[Any]], demo_repository: Path, voice: Voice, tmp_path: Path
) -> None:
    """The alert's own expression, with a shorter look back, in Prometheus: nothing, the pod, nothing."""
    (alert,) = [query for query in of_the_rules() if "cosytriton_requests_active" in query]
    alert = alert.replace("[3m]", "[5s]")
    with (
        serve(demo_repository, tmp_path / "serve.log") as own,
        scraping(own.metrics_port, tmp_path) as prometheus,
        ThreadPoolExecutor(1) as pool,
    ):
        children = psutil.Process(own.process.pid).children(recursive=True)
        (model,) = [child for child in children if "/speech_lm/" in " ".join(child.cmdline())]
        assert prometheus.ask("query", query=alert)["result"] == []
        assert put_load(own.grpc_url, voice, 3.0) > 0
        assert prometheus.ask("query", query=alert)["result"] == []
        model.suspend()
        try:
            load = pool.submit(put_load, own.grpc_url, voice, 1.0)
            wait_for(lambda: bool(prometheus.ask("query", query=alert)["result"]), 15)
        finally:
            model.resume()
        assert load.result() > 0
        wait_for(lambda: not prometheus.ask("query", query=alert)["result"], 15)


def _count(prometheus: Prometheus) -> int:
    return int(_value(prometheus, 'cosytriton_first_audio_seconds_count{model="tts_stream"}'))


def _value(prometheus: Prometheus, query: str) -> float:
    ((_, value),) = [one["value"] for one in prometheus.ask("query", query=query)["result"]]
    return float(value)


Curve = tuple[dict[str, str], list[float], list[float]]


def _curves(prometheus: Prometheus, expression: str, begin: float, end: float) -> list[Curve]:
    """Labels, seconds since the beginning and values of each series, as Grafana would ask for them."""
    for variable, value in {"$__rate_interval": "10s", "$namespace": ".*", "$job": ".*"}.items():
        expression = expression.replace(variable, value)
    answer = prometheus.ask("query_range", query=expression, start=begin, end=end, step=1)
    assert answer["resultType"] == "matrix"
    return [
        (one["metric"], [at - begin for at, _ in one["values"]], [float(value) for _, value in one["values"]])
        for one in answer["result"]
    ]


def _draw(curves: list[tuple[dict[str, Any], str, list[Curve]]], page: Path) -> None:
    """The panels with their data, without Grafana."""
    from plotly.subplots import make_subplots

    columns, height = 4, 250
    rows = math.ceil(len(PANELS) / columns)
    titles = [f"{panel['title']} ({panel['fieldConfig']['defaults']['unit']})" for panel in PANELS]
    figure = make_subplots(
        rows, columns, subplot_titles=titles, vertical_spacing=0.05, horizontal_spacing=0.04
    )
    numbers = {panel["id"]: number for number, panel in enumerate(PANELS)}
    for panel, legend, found in curves:
        number = numbers[panel["id"]]
        place = {"row": number // columns + 1, "col": number % columns + 1, "legend": f"legend{number + 2}"}
        for labels, seconds, values in found:
            name = Template(legend.replace("{{", "${").replace("}}", "}")).safe_substitute(labels)
            style = {"mode": "lines", "line": {"width": 1}, "showlegend": any(value > 0 for value in values)}
            figure.add_scatter(x=seconds, y=values, name=name, **style, **place)
        x, y = (figure.get_subplot(place["row"], place["col"])[axis].domain for axis in (0, 1))
        look = {
            "x": x[0],
            "y": y[1],
            "yanchor": "top",
            "font": {"size": 8},
            "bgcolor": "rgba(255,255,255,0.5)",
        }
        figure.update_layout({place["legend"]: look})
    figure.update_annotations(font_size=12)  # the titles
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(height=height * rows, width=1400, margin={"l": 30, "r": 10, "t": 30, "b": 20})
    figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
