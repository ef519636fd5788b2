"""`dspark serve`'s configuration: three sources, one strict tree."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dspark.cli.main import app, main
from dspark.cli.options import TARGET
from dspark.core.errors import DsparkError
from dspark.deploy.serve_config import ServeConfig, configure
from dspark.deploy.single import TargetConfig

from ..cli.conftest import DSPARK


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


def refused(
    file: Path | None = None,
    environment: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
) -> str:
    with pytest.raises(DsparkError) as caught:
        configure(file, environment or {}, flags or {})
    return str(caught.value)


# --- which source wins ---------------------------------------------------------------------------


def test_without_a_word_the_defaults_hold() -> None:
    config = configure(None, {}, {"http.port": None, "tls.key": None})
    assert config == ServeConfig()
    assert (config.http.host, config.grpc.host) == ("127.0.0.1", "127.0.0.1")
    assert config.target().engine.kv_tokens == 65_536


def test_file_then_environment_then_flags(file: Path) -> None:
    file.write_text("http: {port: 1, host: localhost}\ngrpc: {port: 1}\nname: file\ndrain_s: 1\n")
    environment = {"DSPARK_HTTP__PORT": "2", "DSPARK_GRPC__PORT": "2", "DSPARK_NAME": "set"}
    config = configure(file, environment, {"http.port": 3})
    assert (config.http.port, config.grpc.port, config.name) == (3, 2, "set")
    assert (config.http.host, config.drain_s) == ("localhost", 1), "a section is merged by field"


def test_one_section_from_three_sources(file: Path) -> None:
    file.write_text("tls: {certificate: a.pem}\n")
    config = configure(file, {"DSPARK_TLS__CLIENT_CA": "b.pem"}, {"tls.key": "c.pem"})
    assert config.tls is not None
    assert config.tls.model_dump() == {
        "certificate": "a.pem",
        "client_ca": "b.pem",
        "key": "c.pem",
    }


def test_what_the_environment_says_has_the_fields_type() -> None:
    config = configure(
        None,
        {
            "DSPARK_NAME": "8000",
            "DSPARK_MODEL": "[odd: path",
            "DSPARK_DRAIN_S": "2.5",
            "DSPARK_COUPLE_UNSEEDED": "true",
            "DSPARK_ENGINE__VERIFY": "fixed:2",
            "DSPARK_VERIFICATION": "{port: 7}",
            "DSPARK_HTTP_BOUNDS__BODY_BYTES": "1024",
        },
        {},
    )
    assert (config.name, config.model, config.drain_s) == ("8000", "[odd: path", 2.5)
    assert config.couple_unseeded
    assert config.target().engine.verify == "fixed:2"
    assert config.verification is not None
    assert config.verification.port == 7
    assert config.bounds().body_bytes == 1024


def test_variables_of_other_programs_are_left_alone() -> None:
    environment = {"PATH": "x", "DSPARK_CACHE": "y", "DSPARK_API_KEY": "z", "DSPARK_ADDRESS": "w"}
    assert configure(None, environment, {}) == ServeConfig()


def test_a_file_in_json(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    path.write_text(json.dumps({"grpc": {"port": 9}}))
    assert configure(path, {}, {}).grpc.port == 9


def test_one_value_says_how_long_a_reader_may_stand_still(file: Path) -> None:
    config = configure(None, {"DSPARK_ENGINE__STALL_TIMEOUT_S": "5"}, {})
    assert config.target().engine.stall_timeout_s == config.bounds().stall_timeout_s == 5
    for name in ("stalled_s", "stall_timeout_s"):
        file.write_text(f"http_bounds: {{{name}: 5}}\n")
        assert refused(file) == f"{file}: http_bounds.{name}: is not a known field"


# --- what is refused -----------------------------------------------------------------------------


def test_an_unknown_name_in_each_source(file: Path) -> None:
    file.write_text("http: {prot: 80}\n")
    assert refused(file) == f"{file}: http.prot: is not a known field"
    assert refused(environment={"DSPARK_HTTP__PROT": "80"}) == (
        "DSPARK_HTTP__PROT: http.prot: is not a known field"
    )
    assert refused(environment={"DSPARK_PORT": "{"}) == "DSPARK_PORT: port: is not a known field"
    assert refused(flags={"http.prot": 80}) == "command line: http.prot: is not a known field"


def test_every_source_that_is_wrong_is_named(file: Path) -> None:
    file.write_text("nmae: x\n")
    told = refused(file, {"DSPARK_THREADS": "many"}, {"http.port": -1})
    assert told.startswith(f"{file}, DSPARK_THREADS, command line: ") or told.startswith(
        f"DSPARK_THREADS, command line, {file}: "
    )
    for field in ("nmae: ", "threads: ", "http.port: "):
        assert field in told


def test_half_of_a_section_names_who_began_it() -> None:
    told = refused(environment={"DSPARK_TLS__CERTIFICATE": "a.pem"})
    assert told == "DSPARK_TLS__CERTIFICATE: tls.key: Field required"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("http: {port: '80'}", "http.port"),
        ("http: 80", "http"),
        ("http: null", "http"),
        ("name: 80", "name"),
        ("couple_unseeded: 1", "couple_unseeded"),
        ("drain_s: soon", "drain_s"),
        ("drain_s: .inf", "drain_s"),
        ("drain_s: 0", "drain_s"),
        ("threads: 1.5", "threads"),
        ("engine: {gamma: seven}", "engine.gamma"),
        ("log_level: loud", "log_level"),
        ("[]", "the file"),
        ("", "the file"),
        ("name: a\nname: b", "name"),
        ("name: [", "line 1"),
    ],
)
def test_a_wrong_type(file: Path, text: str, field: str) -> None:
    file.write_text(text)
    assert refused(file).startswith(f"{file}: {field}: ")


@pytest.mark.parametrize("port", [-1, 65_536, 10**9])
@pytest.mark.parametrize("server", ["http", "grpc", "verification"])
def test_a_port_out_of_range(file: Path, server: str, port: int) -> None:
    file.write_text(f"{server}: {{port: {port}}}\n")
    assert refused(file).startswith(f"{file}: {server}.port: Input should be ")
    variable = f"DSPARK_{server.upper()}__PORT"
    assert refused(environment={variable: str(port)}).startswith(f"{variable}: {server}.port: ")
    assert refused(flags={f"{server}.port": port}).startswith(f"command line: {server}.port: ")


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("DSPARK_ENGINE__KV_TOKENS", "0", "engine.kv_tokens: 0 must be above 0"),
        ("DSPARK_ENGINE__GAMMA", "-1", "engine.gamma: -1 must be in"),
        ("DSPARK_HTTP_BOUNDS__IDLE_S", "0", "http_bounds.idle_s: 0 must be above 0"),
        ("DSPARK_DTYPE", "int3", "dtype: 'int3' is not one of: "),
        ("DSPARK_ENGINE__VERIFY", "maybe", "verify: 'maybe' must be"),
        ("DSPARK_HTTP__PORT", "[", "DSPARK_HTTP__PORT: is not YAML"),
    ],
)
def test_a_value_that_cannot_be(variable: str, value: str, told: str) -> None:
    assert refused(environment={variable: value}).startswith(told)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert refused(missing) == f"{missing}: No such file or directory"


@pytest.mark.parametrize(
    "line", ["api_key: {}", "http: {{port: {}}}", "engine: {}", "keys: [{}]", "log_level: {}"]
)
def test_no_error_shows_a_value(file: Path, line: str) -> None:
    secret = "dspark-J6kvYv5Jb1"
    file.write_text(line.format(secret))
    assert secret not in refused(file)


@pytest.mark.parametrize("name", ["PASSWORD", "HTTP__PORT", "ENGINE", "LOG_LEVEL", "DRAIN_S"])
def test_no_error_shows_a_variables_value(name: str) -> None:
    secret = "dspark-J6kvYv5Jb1"
    assert secret not in refused(environment={f"DSPARK_{name}": secret})


# --- --print-config ------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["serve", "--print-config", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_what_is_printed_read_back_is_the_same(
    capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_ENGINE__KV_TOKENS", "4096")
    monkeypatch.setenv("DSPARK_VERIFICATION__PORT", "7")
    flags = ("--http-port", 0, "--name", "12", "--model", "wéird: [name", "--gamma", 3)
    tls = ("--tls-certificate", "a.pem", "--tls-key", "b.pem", "--keys", "keys.yaml")
    text = printed(capsys, *flags, *tls)
    monkeypatch.delenv("DSPARK_ENGINE__KV_TOKENS")
    monkeypatch.delenv("DSPARK_VERIFICATION__PORT")
    file.write_text(text)
    assert printed(capsys, "--config", file) == text
    again = configure(file, {}, {})
    assert again.engine.kv_tokens == 4096
    assert (again.name, again.model, again.engine.gamma) == ("12", "wéird: [name", 3)


def test_what_is_printed_names_every_field_and_no_secret(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_API_KEY", "dspark-a-secret")
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"tenants: {{a: {{keys: [{'ab' * 32}]}}}}")
    text = printed(capsys, "--keys", keys)
    assert set(yaml.safe_load(text)) == set(ServeConfig.model_fields)
    assert "secret" not in text
    assert "abab" not in text


def test_a_bad_configuration_is_one_line_and_status_2(tmp_path: Path) -> None:
    """Before anything is loaded: there is no such model either."""
    ended = subprocess.run(
        [DSPARK, "serve", "--model", tmp_path / "none", "--http-port", "70000"],
        env={**os.environ, "DSPARK_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("dspark: command line: http.port: Input should be ")
    assert ended.stderr.count("\n") == 1


# --- flags, environment and file -----------------------------------------------------------------

# Each flag's field and a value that is not its default.
FLAGS: dict[str, tuple[str, object]] = {
    "--model": ("model", "some-model"),
    "--backend": ("backend", "transformers"),
    "--drafter": ("drafter", "none"),
    "--gamma": ("engine.gamma", 3),
    "--verify": ("engine.verify", "fixed:2"),
    "--dtype": ("dtype", "bfloat16"),
    "--device": ("device", "cuda:1"),
    "--threads": ("threads", 3),
    "--kv-tokens": ("engine.kv_tokens", 4096),
    "--name": ("name", "some-name"),
    "--keys": ("keys", "keys.yaml"),
    "--http-port": ("http.port", 1234),
    "--grpc-port": ("grpc.port", 1234),
}
# They stand for two fields each, or say where the configuration is.
OTHERS = {"--host", "--tls-certificate", "--tls-key", "--config", "--print-config", "--help"}


def options_of(command: str) -> dict[str, str]:
    """Its flags, and under which heading each stands."""
    commands: Any = typer.main.get_command(app)
    return {
        option.opts[0]: getattr(option, "rich_help_panel", None) or ""
        for option in commands.commands[command].params
        if option.opts[0].startswith("--")
    }


def test_serve_takes_what_generate_takes_of_target_and_drafter() -> None:
    def of(command: str) -> set[str]:
        return {flag for flag, heading in options_of(command).items() if heading == TARGET}

    assert of("serve") == of("generate") > {"--backend"}
    fields = {name for name in TargetConfig.__dataclass_fields__ if name != "engine"}
    assert {f"--{name}" for name in fields} <= of("serve")


def test_every_flag_is_known_here() -> None:
    assert set(options_of("serve")) == set(FLAGS) | OTHERS - {"--help"}


@pytest.mark.parametrize("flag", FLAGS)
def test_flag_environment_and_file_say_the_same(
    capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    path, value = FLAGS[flag]
    by_flag = printed(capsys, flag, value)
    tree: Any = value
    for name in reversed(path.split(".")):
        tree = {name: tree}
    file.write_text(yaml.safe_dump(tree))
    assert printed(capsys, "--config", file) == by_flag
    monkeypatch.setenv("DSPARK_" + path.upper().replace(".", "__"), str(value))
    assert printed(capsys) == by_flag
    assert by_flag != ServeConfig().to_yaml()


def test_a_backend_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config", "--backend", "magic"]) == 2
    told = capsys.readouterr().err
    assert told == "dspark: backend: 'magic' is not one of: auto, native, transformers\n"
