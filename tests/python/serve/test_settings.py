"""What `sharpi serve` can be told: values, files, options, and the names of models."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sharpi import InvalidRequestError, ModelFileError
from sharpi.cli.commands import serve as command
from sharpi.loading.description import BUNDLED_MODEL
from sharpi.serve.models.catalog import ModelFile, catalogue
from sharpi.serve.settings import ServerSettings, is_loopback, read_config


@pytest.mark.parametrize(("given", "said"), [
    ({"port": 65536}, "port must be 0 to 65535, not 65536"),
    ({"port": "80"}, "port must be a whole number"),
    ({"max_queue": -1}, "max_queue must be 0 to 65536"),
    ({"max_gap": 0}, "max_gap must be more than 0"),
    ({"max_gap": float("nan")}, "max_gap must be 0 or more seconds"),
    ({"drain_seconds": float("inf")}, "drain_seconds must be 0 or more seconds"),
    ({"parallel": 0}, "parallel must be 1 to 1024"),
    ({"memory": "much"}, "memory: 'much' is no amount of memory"),
    ({"vram": "12 apples"}, "VRAM"),
    ({"spill": "much"}, "spill: 'much' is no amount of memory"),
    ({"spill": -1}, "spill"),
    ({"cache_dir": ""}, "cache_dir is empty"),
    ({"cache_dir_size": "all"}, "cache_dir_size: 'all' is no amount"),
    ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
    ({"models": "a.gguf"}, "models must be a list of texts"),
    ({"models": [""]}, "models is empty"),
    ({"host": ""}, "host is empty"),
    ({"insecure": "yes"}, "insecure must be true or false"),
    ({"cors_origins": ["example.org"]}, "is no origin"),
    ({"cors_origins": ["https://example.org/page"]}, "is no origin"),
])
def test_a_wrong_setting_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        ServerSettings(**given)


@pytest.mark.parametrize("key", ["", "a b", "schlüssel", "a\nb", "k" * 513])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="a key of api_keys") as caught:
        ServerSettings(api_keys=(key,))
    assert not key or key not in str(caught.value)


def test_all_settings_have_a_check_and_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('host = "127.0.0.2"\nport = 0\nmax_gap = 1\nmemory = "2GiB"\napi_keys = ["a", "b"]\n'
                    'cors_origins = ["*"]\nparallel = 3\ncontext = 256\ninsecure = true\n')
    made = ServerSettings(**read_config(file))
    assert (made.host, made.port, made.max_gap, made.memory_bytes) == ("127.0.0.2", 0, 1.0, 2 << 30)
    assert made.api_keys == ("a", "b") and made.cors_origins == ("*",) and made.insecure
    assert made.load_arguments()["context"] == 256 and made.load_arguments()["sequences"] == 4
    assert ServerSettings(**{field.name: getattr(made, field.name) for field in fields(made)}) == made


def test_models_of_a_file_are_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    file = tmp_path / "serve.toml"
    file.write_text('models = ["a.gguf", "b=gone.gguf", "c=user/repo:Q4_K_M"]\napi_key_file = "keys"\n')
    given = read_config(file)
    assert given["models"] == [str(tmp_path / "a.gguf"), f"b={tmp_path / 'gone.gguf'}", "c=user/repo:Q4_K_M"]
    assert given["api_key_file"] == str(tmp_path / "keys")


def test_the_cache_of_prompts_is_set(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('cache_dir = "cache"\ncache_dir_size = "2GiB"\nspill = 0\n')
    made = ServerSettings(**read_config(file))
    given = made.scheduler_arguments()
    assert given["cache_dir"] == str(tmp_path / "cache")
    assert (given["cache_dir_bytes"], given["spill_bytes"]) == (2 << 30, 0)
    plain = ServerSettings().scheduler_arguments()
    assert (plain["cache_dir"], plain["cache_dir_bytes"], plain["spill_bytes"]) == (None, 16 << 30, None)


@pytest.mark.parametrize(("text", "said"), [
    ("prot = 80", "unknown setting 'prot'; there are models, host, port"),
    ("port = ", "is not TOML"),
    ("port = 70000", "serve.toml: port must be"),
    ("\xff", "is not TOML"),
    ("[server]\nport = 1", "unknown setting 'server'"),
])
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequestError, match=said) as caught:
        read_config(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="No such file"):
        read_config(tmp_path / "none.toml")


@pytest.mark.parametrize(("host", "alone"), [
    ("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("127.9.9.9", True),
    ("0.0.0.0", False), ("::", False), ("192.168.1.2", False), ("example.org", False)])
def test_other_machines_need_a_key(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone
    ServerSettings(host=host, api_keys=("k",)).require_safe()
    ServerSettings(host=host, insecure=True).require_safe()
    if alone:
        return ServerSettings(host=host).require_safe()
    with pytest.raises(InvalidRequestError, match="--insecure"):
        ServerSettings(host=host).require_safe()


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings that the command makes instead of serving."""
    made: list[ServerSettings] = []

    def keep(config: str | None, options: dict[str, Any]) -> ServerSettings:
        made.append(_settings(config, options))
        raise InvalidRequestError("enough")

    _settings = command._settings
    monkeypatch.setattr(command, "_settings", keep)
    monkeypatch.delenv("SHARPI_API_KEY", raising=False)
    return made


def test_options_win_over_the_file_and_the_file_over_the_environment(
        tmp_path: Path, told: list[ServerSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPI_API_KEY", "from-the-environment")
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nmax_queue = 2\ndevice = "cpu"\ncpu_moe = true\n')
    run = CliRunner().invoke
    run(command.serve_command, ["--config", str(file), "--port", "3", "-m", "x=y.gguf"])
    [made] = told
    assert (made.port, made.max_queue, made.device, made.cpu_moe) == (3, 2, "cpu", True)
    assert made.models == ("x=y.gguf",) and made.api_keys == ("from-the-environment",)
    file.write_text('api_keys = ["from-the-file"]\n')
    run(command.serve_command, ["--config", str(file)])
    assert told[1].api_keys == ("from-the-file",)
    run(command.serve_command, ["--config", str(file), "--api-key", "typed", "--device", "auto"])
    assert told[2].api_keys == ("typed",)


def test_what_is_missing_is_said_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else object())
    found = CliRunner().invoke(command.serve_command, [])
    assert found.exit_code == 1
    assert found.output.splitlines()[-1] == ("Error: the server needs packages that are not installed (uvicorn):"
                                             " pip install 'sharpi[serve]'")


# --- the names of models ----------------------------------------------------------------------------------------------


def no_hub(name: str) -> str:
    raise AssertionError(f"{name} is no name on the Hub")


def test_models_are_called_as_their_files(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.Q4_K_M.gguf", "two-00002-of-00003.gguf", "a=b.gguf")]
    for path in paths:
        path.touch()
    assert catalogue([str(path) for path in paths], no_hub) == (
        ModelFile("one.Q4_K_M", paths[0]), ModelFile("two", paths[1]), ModelFile("a=b", paths[2]))
    assert catalogue([f"short={paths[0]}"], no_hub) == (ModelFile("short", paths[0]),)
    assert catalogue([], no_hub) == (ModelFile("story", BUNDLED_MODEL),)


def test_a_folder_is_all_of_its_whole_models(tmp_path: Path) -> None:
    for name in ("b.gguf", "deep/a.gguf", "mmproj-b.gguf", "half-00001-of-00002.gguf", "big-00001-of-00002.gguf",
                 "big-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [file.name for file in catalogue([str(tmp_path)], no_hub)] == ["a", "b", "big"]
    assert catalogue([str(tmp_path)], no_hub)[2].path == tmp_path / "big-00001-of-00002.gguf"
    shutil.rmtree(tmp_path / "deep")
    for file in tmp_path.glob("b*.gguf"):
        file.unlink()
    with pytest.raises(ModelFileError, match="has no model"):
        catalogue([str(tmp_path)], no_hub)


def test_names_on_the_hub_are_kept_as_they_were_given(tmp_path: Path) -> None:
    def locate(name: str) -> str:
        assert name == "user/repo:Q4_K_M"
        return str(tmp_path / "file.gguf")

    assert [file.name for file in catalogue(["user/repo:Q4_K_M"], locate)] == ["user/repo:Q4_K_M"]
    assert [file.name for file in catalogue(["mine=user/repo:Q4_K_M"], locate)] == ["mine"]


def test_two_models_cannot_have_one_name(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.gguf").touch()
    both = [str(tmp_path / "x/same.gguf"), str(tmp_path / "y/same.gguf")]
    with pytest.raises(InvalidRequestError, match="two models would be called same"):
        catalogue(both, no_hub)
    assert len(catalogue([both[0], f"other={both[1]}"], no_hub)) == 2
    assert len(catalogue([both[0], both[0]], no_hub)) == 1


@pytest.mark.parametrize("model", ["gone.gguf", "name=gone.gguf", "name="])
def test_a_model_that_is_not_there_is_one_line(model: str) -> None:
    with pytest.raises((ModelFileError, InvalidRequestError), match="no such file|names no model"):
        catalogue([model], no_hub)


def test_the_example_of_a_file_is_one() -> None:
    given = read_config(Path(__file__).parents[3] / "docs/serve/serve.toml")
    assert ServerSettings(**given).parallel == 16 and given["models"][1] == "coder=user/repo:Q4_K_M"
