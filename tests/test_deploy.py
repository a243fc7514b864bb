"""deploy/ without Docker, Compose or systemd: what its files say agrees with the code, and with each other."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools
import yaml

from ringserve.server import cli
from ringserve.server.app import ENDPOINTS
from ringserve.server.launcher import _GRACE_S
from ringserve.server.settings.config import ServeConfig
from ringserve.shm_transport.config import RingConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DEFAULT_SHM_BYTES = 64 * 2**20  # Docker's


def dockerfile() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions: name and argument."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text()))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def final_stage() -> dict[str, str]:
    """Return the instructions of the Dockerfile's last stage, the last of each name."""
    instructions = dockerfile()
    start = max(i for i, (name, _) in enumerate(instructions) if name == "FROM")
    return dict(instructions[start:])


def unit() -> dict[str, list[str]]:
    """Return the systemd unit's settings, whatever their section."""
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "ringserve.service").read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def compose(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text())


def config_of(command: list[str]) -> ServeConfig:
    """Return what `ringserve serve ...` would be configured with."""
    assert Path(command[0]).name == "ringserve"
    options = cli._parser().parse_args(command[1:])
    assert options.command == "serve"
    return ServeConfig(**cli._given(options, ServeConfig))


def env_of(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(text))


def test_the_image_serves_on_every_interface_at_the_port_that_it_exposes_and_checks() -> None:
    stage = final_stage()
    config = config_of(json.loads(stage["ENTRYPOINT"]))  # JSON: no shell stands between a signal and the server
    assert config.host == "0.0.0.0"
    assert config.port == int(stage["EXPOSE"])
    assert stage["STOPSIGNAL"] == "SIGTERM"
    check = json.loads(stage["HEALTHCHECK"].partition("CMD ")[2])
    assert f"'127.0.0.1', {config.port}" in check[2]
    (path,) = re.findall(r"'GET', '([^']+)'", check[2])
    assert path in {endpoint.path for endpoint in ENDPOINTS}


def test_the_health_check_fails_where_nobody_listens() -> None:
    python, *arguments = json.loads(final_stage()["HEALTHCHECK"].partition("CMD ")[2])
    assert python == "/opt/ringserve/bin/python"
    code = arguments[1].replace("8000", "1")
    done = subprocess.run(["python3", arguments[0], code], capture_output=True, timeout=30, check=False)
    assert done.returncode == 1


def test_the_image_runs_as_a_numbered_user_who_owns_the_volume_where_models_are_kept() -> None:
    stage = final_stage()
    user, _, group = stage["USER"].partition(":")
    assert int(user) > 0  # by number, so that Kubernetes can see that it is not root
    assert group == user
    assert f"groupadd --gid {group} ringserve" in stage["RUN"]
    assert f"--uid {user} --gid {group} " in stage["RUN"]
    (volume,) = stage["VOLUME"].split()
    assert f"install -d -o ringserve -g ringserve {volume}" in stage["RUN"]
    environment = env_of(stage["ENV"])
    assert {"HOME", "HF_HOME", "RINGSERVE_CACHE"} <= set(environment)
    assert all(path.startswith(volume) for path in environment.values() if path[0] == "/")


def test_the_image_is_made_of_files_that_exist_and_reach_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copies = [text.split() for name, text in dockerfile() if name == "COPY" and "--from" not in text]
    copied = [path for *paths, _ in copies for path in paths]
    assert {"ringserve", "server", "engine", "shm_transport", "pyproject.toml"} <= set(copied)
    assert "*" in ignored
    for path in copied:
        assert (ROOT / path).exists()
        assert f"!{path}" in ignored
    assert {line[1:] for line in ignored if line[0] == "!"} == set(copied)


def test_an_installed_ringserve_has_every_package_and_the_files_between() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = set(setuptools.find_packages(str(ROOT), include=settings["packages"]["find"]["include"]))
    with_code = {"ringserve"} | {
        ".".join(("ringserve", *file.parent.relative_to(ROOT).parts))
        for top in ("server", "engine", "shm_transport") for file in (ROOT / top).rglob("*.py")
    }  # fmt: skip
    assert listed == with_code
    for package in listed:
        patterns = settings["package-data"].get(package, [])
        for file in (ROOT / package.replace(".", "/")).iterdir():
            is_data = file.is_file() and file.suffix not in (".py", ".pyc")
            assert not is_data or any(file.match(pattern) for pattern in patterns), file


def test_the_rings_fit_the_shared_memory_that_a_container_has_by_default() -> None:
    assert RingConfig().total_bytes < DEFAULT_SHM_BYTES / 4
    assert "shm_size" not in json.dumps(compose("compose.yaml")["services"])


def test_compose_publishes_the_ports_on_this_machine_alone_and_keeps_the_models() -> None:
    services, stage = compose("compose.yaml")["services"], final_stage()
    for name, service in services.items():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), name
    server = services["ringserve"]
    assert server["ports"][0].endswith(f":{stage['EXPOSE']}")
    assert (DEPLOY / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert server["volumes"][0].endswith(f":{stage['VOLUME']}")
    assert server["cap_drop"] == ["ALL"]
    assert set(compose("compose.yaml")["volumes"]) == {
        volume.partition(":")[0] for service in services.values() for volume in service["volumes"] if volume[0] != "."
    }


def test_compose_mounts_files_that_exist() -> None:
    mounted = [
        volume for service in compose("compose.yaml")["services"].values() for volume in service["volumes"]
        if volume[0] == "."
    ]  # fmt: skip
    assert len(mounted) == 3
    for volume in mounted:
        source, _, mode = volume.split(":")
        assert (DEPLOY / source).exists()
        assert mode == "ro"


def test_compose_for_cuda_gives_build_arguments_that_the_dockerfile_has() -> None:
    arguments = {text.partition("=")[0] for name, text in dockerfile() if name == "ARG"}
    overrides = compose("compose.cuda.yaml")["services"]
    assert set(overrides) <= set(compose("compose.yaml")["services"])
    given = overrides["ringserve"]["build"]["args"]
    assert set(given) == arguments
    text = (DEPLOY / "Dockerfile").read_text()
    assert all(value in text for value in given.values())  # the comment at its top says the same


def test_prometheus_scrapes_the_metrics_of_the_server_and_grafana_asks_prometheus() -> None:
    services = compose("compose.yaml")["services"]
    (job,) = compose("prometheus.yml")["scrape_configs"]
    assert job["metrics_path"] in {endpoint.path for endpoint in ENDPOINTS}
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host in services
    assert port == final_stage()["EXPOSE"]
    (datasource,) = compose("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert datasource["url"] == "http://prometheus:9090"
    assert services["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]


def test_grafana_finds_the_dashboard_where_its_provider_looks() -> None:
    (provider,) = compose("grafana/provisioning/dashboards/ringserve.yaml")["providers"]
    mounts = dict(volume.split(":")[:2] for volume in compose("compose.yaml")["services"]["grafana"]["volumes"])
    assert Path(mounts["./grafana/ringserve.json"]).parent == Path(provider["options"]["path"])
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert json.loads((DEPLOY / "grafana/ringserve.json").read_text())["title"] == "ringserve"


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s?", text)
    assert match is not None
    return float(match[1])


def test_a_drain_may_take_its_time_before_anything_kills_the_server() -> None:
    drain_s = ServeConfig().drain_timeout + _GRACE_S + 2 + 2  # the engine's end, and the last spans
    (stop,) = unit()["TimeoutStopSec"]
    assert seconds(stop) >= drain_s
    assert seconds(compose("compose.yaml")["services"]["ringserve"]["stop_grace_period"]) >= drain_s


def test_the_unit_starts_the_server_as_a_user_and_signals_it_alone() -> None:
    settings = unit()
    (command,) = settings["ExecStart"]
    words = command.split()
    assert words[-1] == "$SERVE_ARGS"
    assert config_of(words[:-1]) == ServeConfig(host="127.0.0.1", port=8000)
    assert settings["User"] == settings["Group"] == ["ringserve"]
    assert settings["Type"] == ["exec"]
    assert settings["KillMode"] == ["mixed"]  # the engine must outlive the SIGTERM, for streams to end
    assert settings["NoNewPrivileges"] == ["yes"]
    environment = env_of(" ".join(settings["Environment"]))
    cache = f"/var/cache/{settings['CacheDirectory'][0]}"
    assert environment["RINGSERVE_CACHE"] == environment["HOME"] == settings["WorkingDirectory"][0] == cache
    assert environment["HF_HOME"].startswith(cache)
    assert "MemoryDenyWriteExecute" not in settings  # torch writes code
    assert "PrivateIPC" not in settings


@pytest.fixture
def verified_unit(tmp_path: Path) -> Iterator[Path]:
    """The unit, with a program that exists."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / "ringserve.service"
    path.write_text((DEPLOY / "ringserve.service").read_text().replace("/opt/ringserve/bin/ringserve", "/bin/true"))
    return path


def test_systemd_understands_every_line_of_the_unit(verified_unit: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(verified_unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_documentation_names_flags_and_files_that_exist() -> None:
    text = (ROOT / "docs/deploy.md").read_text()
    for path in re.findall(r"\bdeploy/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    known = {action for option in _options() for action in option}
    foreign = {"--stop-timeout", "--build", "--gpus", "--shm-size", "--read-only", "--tmpfs", "--init"}  # Docker's
    foreign |= {"--system", "--home-dir", "--user-group", "--now", "--health-cmd", "--no-healthcheck"}
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
        assert flag in known | foreign, flag


def _options() -> list[list[str]]:
    (commands,) = [action for action in cli._parser()._actions if action.dest == "command"]
    return [action.option_strings for action in commands.choices["serve"]._actions]  # type: ignore[union-attr]
