"""The command line: what it prints, where it writes, and that no mistake ends in a traceback."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import torchglb as glb
from torchglb import cli, policies
from torchglb.simulate import Configuration, Record, find_preset, presets, read_table, runner

PRESET = """
title = "A small one"
horizon = 12
replicates = 2
S = [3, 5]
arms = 5
policies = ["ofuglb", "emk-ftrl", "random"]
[policy.emk-ftrl]
policy = "emk"
regularizer = "ftrl"
[quick]
horizon = 6
S = [3]
"""


@pytest.fixture
def preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(PRESET)
    return "small.toml"


def run(*words):
    return cli.main(["run", *words, "--executor", "serial"])


# ---- run -------------------------------------------------------------------------------------


def test_run_writes_everything_and_says_where(preset, tmp_path, capsys):
    assert run(preset, "--quick") == 0
    printed = capsys.readouterr()
    record = Record.open(tmp_path / "results" / "small-quick")
    assert record.complete
    assert record.config["horizon"] == 6
    for label in record.labels:
        assert label in printed.out
    pictures = [line for line in printed.out.splitlines() if line.endswith((".png", ".html"))]
    assert pictures
    assert all((tmp_path / line).exists() for line in pictures)
    assert "100%" in printed.err
    # the other commands, on what is there
    assert cli.main(["plot", str(record.directory)]) == 0
    assert cli.main(["report", str(record.directory)]) == 0
    assert cli.main(["compare", str(record.directory), str(record.directory)]) == 0


def test_flags_override_keys(preset):
    words = ["--policies", "emk-ftrl,random", "--S", "2.5,4", "--horizon", "9", "--replicates", "3"]
    words += ["--seed", "5", "--delta", "0.1", "--set", "policy.emk-ftrl.regularization=2.0"]
    words += ["--set", "theta=random", "--set", "arms=7"]
    given = cli._parser().parse_args(["run", preset, *words])
    config = Configuration.load(cli.configuration_table(given)).as_dict()
    assert config["policies"] == ["emk-ftrl", "random"]
    assert config["policy"]["emk-ftrl"] == {
        "policy": "emk", "regularizer": "ftrl", "regularization": 2.0,
    }  # fmt: skip
    assert (config["S"], config["horizon"], config["replicates"]) == ([2.5, 4.0], 9, 3)
    assert (config["seed"], config["delta"], config["theta"]) == (5, 0.1, "random")
    assert (config["arms"], config["name"]) == (7, "small")


def test_arms_for_each_replicate(preset):
    """By default all replicates see the same arms; with the flag each has its own."""
    for words, shared in (([], True), (["--arms-per-replicate"], False)):
        given = cli._parser().parse_args(["run", preset, "--replicates", "3", *words])
        config = Configuration.load(cli.configuration_table(given))
        world = config.make_environment(range(config.elements))
        first, second = world.arms(0)[0], world.arms(0)[1]  # two replicates of one S
        assert torch.equal(first, second) == shared


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "preset: expected a TOML file or one of .*figure1.*, got 'nothing'"),
        (["absent.toml"], "preset: expected a TOML file, got 'absent.toml', which does not exist"),
        (["small.toml", "--S", "4,x"], "S: expected a positive number, got 'x'"),
        (["small.toml", "--S", "0.5"], "S: expected numbers above 1"),
        (["small.toml", "--horizon", "ten"], "horizon: expected an integer of at least 1, got 'ten'"),
        (["small.toml", "--policies", "ofuglb,ucb"], "policies: expected one of .*ofuglb.*, got ucb"),
        (["small.toml", "--policies", ","], "policies: expected a list of different labels"),
        (["small.toml", "--delta", "2"], r"delta: expected a number in \(0, 1\), got 2"),
        (["small.toml", "--device", "moon"], "device: expected a device of this machine, got 'moon'"),
        (["small.toml", "--executor", "x"], "executor: expected one of .*'ray', got 'x'"),
        (["small.toml", "--workers", "0"], "workers: expected an integer of at least 1, got 0"),
        (["small.toml", "--save-every", "0"], "save_every: expected a positive finite number, got 0"),
        (["small.toml", "--set", "colour"], "--set: expected KEY=VALUE, got 'colour'"),
        (["small.toml", "--set", "colour=red"], "configuration: expected one of the keys .* got colour = 'red'"),
        (["small.toml", "--set", "policy.ofuglb.hue=1"], "policy.ofuglb: expected one of .* got 'hue'"),
        (["small.toml", "--set", "policy.emk-ftrl.regularizer=x"], "policy emk-ftrl: regularizer: expected one of 'vaw', 'ftrl', got 'x'"),
    ],
)  # fmt: skip
def test_mistakes_are_named(preset, capsys, words, message):
    assert cli.main(["run", *words]) == cli.WRONG
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("horizon = ", "bad.toml: not a TOML file"),
        ("quick = 3", "quick: expected a table, got 3"),
        ("S = 4", "policies: expected a list of different labels"),
        ('policies = ["ofuglb"]\nS = 4', "horizon: expected an integer of at least 1, got None"),
        ('policies = ["ofuglb"]\nhorizon = 4', "S: expected a positive number, got None"),
        ('policies = ["ofuglb"]\nS = 4\nhorizon = 4\npolicy = 1', "policy: expected a table, got 1"),
        ('policies = "ofuglb"\nS = 4\nhorizon = 4', "policies: expected a list of different labels"),
        ("[policy.ofugbl]\nradius = 1\n[x]", "policies: expected a list"),
    ],
)  # fmt: skip
def test_bad_files_are_named(tmp_path, capsys, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    assert run(str(path)) == cli.WRONG
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["run"], ["run", "x", "--hue"], ["run", "x", "--workers", "two"]]
)
def test_wrong_usage_exits_with_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "torchglb" in capsys.readouterr().err


def test_another_configuration_in_the_directory_is_refused(preset, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_pictures", lambda record: [])
    assert run(preset, "--policies", "random", "--out", "there") == 0
    capsys.readouterr()
    assert run(preset, "--policies", "random", "--out", "there", "--seed", "1") == cli.WRONG
    assert "seed: 0 there, 1 now" in capsys.readouterr().err


def test_no_record_no_report(tmp_path, capsys):
    for words in (["plot"], ["report"], ["compare", str(tmp_path)]):
        assert cli.main([*words, str(tmp_path)]) == cli.WRONG
        assert "got no config.json" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(preset, capsys, monkeypatch):
    monkeypatch.setattr(runner, "REPORT_EVERY", 0.0)
    step = runner.Play.step

    def interrupted(play):
        step(play)
        if play.t == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(runner.Play, "step", interrupted)
    assert run(preset, "--policies", "ofuglb", "--out", "over there") == cli.INTERRUPTED
    error = capsys.readouterr().err
    assert "torchglb run small.toml --policies ofuglb --out 'over there' --executor serial" in error
    monkeypatch.undo()


def test_a_failed_task_is_a_failed_command(preset, capsys, monkeypatch):
    def broken(play):
        raise glb.SolverError("no way")

    monkeypatch.setattr(runner.Play, "step", broken)
    assert run(preset, "--policies", "ofuglb") == cli.FAILED
    error = capsys.readouterr().err
    assert "ofuglb, part 0: torchglb.errors.SolverError: no way" in error


# ---- presets ---------------------------------------------------------------------------------


def test_list_shows_presets_and_policies(capsys):
    assert cli.main(["list"]) == 0
    printed = capsys.readouterr().out
    for word in ("figure1", "ofuglb-pb", "time-varying"):
        assert word in printed
    for name in policies.available():  # each with a line of its own
        assert re.search(rf"^{re.escape(name)} +\w.{{20,}}$", printed, re.MULTILINE), name


def test_quick_without_a_quick_form_is_refused(tmp_path, capsys):
    path = tmp_path / "slow.toml"
    path.write_text('policies = ["random"]\nS = 4\nhorizon = 4\narms = 3')
    assert run(str(path), "--quick", "--out", str(tmp_path / "out")) == cli.WRONG
    assert (
        "quick: expected a table [quick] in the configuration, got none" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_counts_may_be_written_as_1e4(preset):
    given = cli._parser().parse_args(["run", preset, "--horizon", "1e4", "--replicates", "2e0"])
    config = Configuration.load(cli.configuration_table(given))
    assert (config.horizon, config.replicates) == (10_000, 2)
    assert isinstance(config.horizon, int)
    given = cli._parser().parse_args(["run", preset, "--horizon", "1.5"])
    with pytest.raises(glb.InputError, match=r"horizon: expected an integer .* got 1\.5"):
        Configuration.load(cli.configuration_table(given))


def test_an_address_needs_ray(preset, capsys):
    assert run(preset, "--address", "127.0.0.1:6379") == cli.WRONG
    assert "address: expected executor 'ray', which alone has one, got executor 'serial'" in (
        capsys.readouterr().err
    )


MY_MODULE = """
from torchglb import policies

@policies.register
class Last(policies.Policy):
    "Plays the last arm."
    name = "last"
    def _scores(self, arms):
        return arms.new_ones(arms.shape[:-1]).cumsum(-1)
    def _update(self, x, r):
        pass
    def _state(self):
        return {}
    def _load(self, state):
        pass
"""


def test_modules_of_ones_own_are_imported_by_every_worker(preset, tmp_path):
    """One beside the preset, where the command runs, and one of a package that is installed."""
    (tmp_path / "my_module.py").write_text(MY_MODULE)
    (tmp_path / "my_plugin.py").write_text(MY_MODULE.replace("last", "installed"))
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torchglb.plugins]\nmine = my_plugin\n")
    words = [sys.executable, "-m", "torchglb.cli", "--import", "my_module", "run", preset]
    words += ["--policies", "last,installed", "--S", "3", "--horizon", "5"]
    words += ["--workers", "1", "--out", "there"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Record.open(tmp_path / "there").labels == ["last", "installed"]


@pytest.mark.parametrize("before", [True, False])
def test_a_module_of_ones_own_is_named_before_or_behind_the_command(preset, before):
    own, command = ["--import", "json"], ["run", preset]
    given = cli._parser().parse_args(own + command if before else command + own)
    assert cli.configuration_table(given)["imports"] == ["json"]


def test_an_installed_plugin_that_cannot_be_imported_is_named(monkeypatch, capsys):
    broken = metadata.EntryPoint("mine", "no_such_module", "torchglb.plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [broken])
    assert cli.main(["list"]) == cli.WRONG
    said = capsys.readouterr().err
    assert "plugin mine: expected a module that can be imported, got 'no_such_module'" in said


def test_a_module_that_is_not_there_is_refused(preset, capsys):
    assert run(preset, "--import", "no_such_module") == cli.WRONG
    assert "imports: expected modules that can be imported, got 'no_such_module'" in (
        capsys.readouterr().err
    )


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert f"torchglb {glb.__version__}" in said
    assert "philox4x32-10" in said


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_presets_and_flags(capsys, tmp_path):
    """The script in a real shell: what it offers after some letters."""
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    ask = """
COMP_WORDS=(torchglb {words}); COMP_CWORD={last}; COMP_LINE="torchglb {words}"
_shtab_torchglb; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    for words, expected in (
        ("run figure1-r", "figure1-random"),
        ("run --hor", "--horizon"),
        ("com", "compare"),
    ):
        text = script + ask.format(words=words, last=len(words.split()))
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd=tmp_path)
        assert expected in done.stdout.split(), done.stdout + done.stderr


def test_zsh_gets_a_script_too(capsys):
    assert cli.main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef torchglb")
    assert "figure1-random" in script


def test_a_reader_who_has_seen_enough_is_no_error():
    """``torchglb list | head -1``: no traceback, no message."""
    command = f"{sys.executable} -m torchglb.cli list | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr == ""


def test_a_broken_pipe_elsewhere_is_an_error(preset, capsys, monkeypatch):
    def broken(*args, **settings):
        raise BrokenPipeError(32, "Broken pipe", "to the worker")

    monkeypatch.setattr(cli, "run", broken)
    assert run(preset) == cli.FAILED
    assert "torchglb: [Errno 32] Broken pipe: 'to the worker'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_sees_its_progress(preset, tmp_path):
    words = (
        f"{sys.executable} -m torchglb.cli run {preset} --quick --policies random --executor serial"
    )
    done = subprocess.run(
        f"({words} --out there 3>&2 2>&1 >/dev/null 3>&-; echo $? > code) | true",
        shell=True, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stderr == ""
    assert (tmp_path / "code").read_text().strip() == "0"
    assert Record.open(tmp_path / "there").complete


def test_presets_are_found_and_load():
    assert {"figure1", "figure2", "figure3", "figure4"} <= set(presets())
    for name in presets():
        for quick in (False, True):
            config = Configuration.load(read_table(find_preset(name), quick=quick))
            assert config.name == name


def test_python_m_torchglb_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchglb", "list"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("torchglb", run_name="__main__")
    assert left.value.code == 0
    assert "figure1" in capsys.readouterr().out
