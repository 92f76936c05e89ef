"""The files in deploy/ parse, and use only metrics and flags that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml

from baton.cli.launch import gateway_parser, node_parser
from baton.core.membership import Role
from baton.gateway.telemetry.metrics.metric_table import ALL

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SCHEMAS = Path(__file__).resolve().parent / "schemas"
BOARD = DEPLOY / "grafana" / "baton.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
PARSERS = {
    "launch_gateway": gateway_parser(),
    "launch_prefill": node_parser(Role.PREFILL),
    "launch_decode": node_parser(Role.DECODE),
}


def exported_names() -> set[str]:
    """All names under which Prometheus stores a sample of ours."""
    names = set()
    for metric in ALL:
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {f"baton_{metric.name}{end}" for end in ends}
    return names


def metric_names(expression: str) -> set[str]:
    """The metrics in a query, except those recorded by rules under other names."""
    without_recorded = re.sub(r"\w+:baton_\w+:\w+", "", expression)
    return set(re.findall(r"\bbaton_\w+", without_recorded))


def board_queries() -> list[str]:
    return [
        target["expr"]
        for panel in json.loads(BOARD.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


def rules() -> list[dict[str, str]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def test_every_metric_in_rules_and_board_exists() -> None:
    used = {name for query in board_queries() for name in metric_names(query)}
    used |= {name for rule in rules() for name in metric_names(rule["expr"])}
    assert used <= exported_names(), used - exported_names()


def test_the_board_shows_every_metric() -> None:
    shown = " ".join(board_queries())
    missing = [m.name for m in ALL if not re.search(rf"\bbaton_{m.name}(_bucket|_sum)?\b", shown)]
    assert not missing, "a panel each: deploy/grafana/make_board.py"


def test_every_label_in_a_query_is_one_of_its_metric() -> None:
    labels = {f"baton_{metric.name}": {*metric.labels, "model_name", "le"} for metric in ALL}
    for query in [*board_queries(), *(rule["expr"] for rule in rules())]:
        for name, matchers in re.findall(r"\b(baton_\w+)\{([^}]*)\}", query):
            stem = re.sub(r"_(bucket|sum|count)$", "", name)
            assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= labels[stem], query


def test_every_query_of_the_board_is_of_the_chosen_model() -> None:
    for query in board_queries():
        for matchers in re.findall(r"\bbaton_\w+(\{[^}]*\})?", query):
            assert 'model_name=~"$model"' in matchers, query


def test_the_board_adds_up_what_waits_at_each_gateway() -> None:
    """The board sums the requests waiting at each gateway, and counts those at engines once, as all
    gateways report them."""
    [waiting] = [query for query in board_queries() if "deployment_requests_waiting" in query]
    own, _, engines = re.sub(r"\{[^}]*\}", "", waiting).partition(" + ")
    assert own == "sum (baton_num_requests_queued)"
    of_engines = "baton_deployment_requests_waiting - baton_num_requests_queued"
    assert engines == f"sum (max by (model_name) ({of_engines}))"


def test_recorded_names_that_alerts_use_are_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {n for rule in rules() for n in re.findall(r"\w+:baton_\w+:\w+", rule["expr"])}
    assert used <= recorded


def test_an_alert_of_a_role_outlives_its_engines_series() -> None:
    """The alert also fires after the engine's series have ended, ten minutes after the engine, or
    if there never were any."""
    [rule] = [rule for rule in rules() if rule.get("alert") == "BatonRoleDown"]
    decode, prefill = rule["expr"].split(" or ")
    for requested, role in ((decode, Role.DECODE), (prefill, Role.PREFILL)):
        series, _, excepted = requested.partition(" unless ")
        assert f'"{role.value}"' in series and excepted.startswith("max by (model_name, role)")
    assert "baton_index_up" in decode and "max_over_time" in prefill


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus' own tool is not here")
def test_alerts_fire_when_they_should() -> None:
    subprocess.run(["promtool", "test", "rules", RULES.with_name("alerts_test.yml")], check=True)


def test_board_is_fresh_and_its_panels_do_not_overlap() -> None:
    path = DEPLOY / "grafana" / "make_board.py"
    spec = importlib.util.spec_from_file_location("make_board", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    board = json.loads(BOARD.read_text())
    assert board == module.board(), "python deploy/grafana/make_board.py"
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        new = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not new & cells and at["x"] + at["w"] <= 24, panel["title"]
        cells |= new
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def command_lines() -> Iterator[list[str]]:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
    for service in compose["services"].values():
        command = service.get("command", "")
        if isinstance(command, str) and command.startswith("launch_"):
            yield shlex.split(command)
    for document in yaml.safe_load_all((DEPLOY / "kubernetes" / "baton.yaml").read_text()):
        for arguments in found_under(document, "args"):
            if arguments[0].startswith("launch_"):
                yield arguments
    settings = dict(
        line.split("=", 1)
        for line in (DEPLOY / "systemd" / "baton.env").read_text().splitlines()
        if not line.startswith("#")
    )
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        [line] = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.M)
        line = re.sub(r"\$(\w+)", lambda match: settings[match[1]], line)
        program, *flags = shlex.split(line)
        yield [Path(program).name, *flags]


def found_under(value: object, key: str) -> Iterator[list[str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            else:
                yield from found_under(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from found_under(inner, key)


def test_every_command_line_is_one_that_our_programs_take() -> None:
    lines = list(command_lines())
    assert len(lines) == 9
    for program, *flags in lines:
        PARSERS[program].parse_args(flags)


@pytest.mark.parametrize(
    "path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: str(path.relative_to(DEPLOY))
)
def test_yaml_parses(path: Path) -> None:
    assert list(yaml.safe_load_all(path.read_text()))


def test_compose_is_by_its_specification() -> None:
    """The compose file is valid by compose-spec/compose-spec at 170098b (licence beside it)."""
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text())

    def faults() -> list[str]:
        return [fault.message for fault in jsonschema.Draft7Validator(schema).iter_errors(compose)]

    compose = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
    assert faults() == []
    compose["services"]["gateway"]["port"] = ["8000:8000"]
    assert len(faults()) == 1 and "'port'" in faults()[0]


def test_compose_starts_what_its_parts_name() -> None:
    """Every target of Prometheus and source of Grafana is a service with that port."""
    services = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())["services"]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    provisioning = DEPLOY / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    named = [t for job in scraped["scrape_configs"] for s in job["static_configs"]
             for t in s["targets"]]  # fmt: skip
    named += [source["url"].partition("//")[2] for source in sources["datasources"]]
    assert len(named) == 2
    for service, port in (target.split(":") for target in named):
        assert any(p.endswith(f":{port}") for p in services[service]["ports"]), service
    mounted = {
        volume.split(":")[1]: volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
    }
    assert {DEPLOY / mounted[rules] for rules in scraped["rule_files"]} == {RULES}
    boards = yaml.safe_load((provisioning / "dashboards" / "baton.yml").read_text())
    folders = {provider["options"]["path"] for provider in boards["providers"]}
    [board] = [inside for inside, outside in mounted.items() if DEPLOY / outside == BOARD]
    assert {str(Path(board).parent)} == folders


def test_what_compose_mounts_is_there() -> None:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            assert (DEPLOY / volume.split(":")[0]).exists(), volume
