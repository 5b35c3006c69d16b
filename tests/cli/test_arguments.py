from __future__ import annotations

import sys

import click
import pytest

from regrow.cli.arguments import Task, TaskCommand
from regrow.errors import UsageError


@click.command(cls=TaskCommand)
@click.option("--slices", type=int, default=2)
@click.option("--chaos")
@click.option("-v", "--verbose", is_flag=True)
def command(**values):
    return values


def parse(*arguments: str):
    return command.main(list(arguments), standalone_mode=False)


@pytest.mark.parametrize(
    ("line", "task"),
    [
        ("train.py", Task("script", "train.py", ())),
        (
            "--slices 3 train.py --lr 3 -- x",
            Task("script", "train.py", ("--lr", "3", "--", "x")),
        ),
        ("-v train.py --slices 9 -v", Task("script", "train.py", ("--slices", "9", "-v"))),
        ("--slices=3 train.py -m pdb", Task("script", "train.py", ("-m", "pdb"))),
        ("-m my.train --help", Task("module", "my.train", ("--help",))),
        ("--chaos kill:1@5s -m my.train -- y", Task("module", "my.train", ("--", "y"))),
        ("-- make test -j2", Task("command", "make", ("test", "-j2"))),
        ("-v -- train.py", Task("command", "train.py", ())),
        ("-- -- x", Task("command", "--", ("x",))),
        ("-", Task("script", "-", ())),
    ],
)
def test_what_is_run_is_passed_through_untouched(line, task):
    assert parse(*line.split())["task"] == task


def test_its_own_options_stand_before():
    values = parse("--slices", "3", "-v", "train.py", "--slices", "4")
    assert (values["slices"], values["verbose"]) == (3, True)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("", "nothing to run"),
        ("--slices 3", "nothing to run"),
        ("--slices", "requires an argument"),
        ("-m", "-m needs the name of a module"),
        ("--", "-- needs a command"),
        ("--colour red train.py", "No such option"),
        ("--slices three train.py", "not a valid integer"),
    ],
)
def test_wrong_usage(line, error):
    with pytest.raises(click.UsageError) as raised:
        parse(*line.split())
    assert error in raised.value.format_message()


def test_usage_tells_what_can_be_run():
    context = click.Context(command, info_name="run")
    assert "(SCRIPT | -m MODULE | -- COMMAND) [ARGS]..." in command.get_usage(context)


def test_command_lines(tmp_path):
    script = tmp_path / "a script.py"
    script.write_text("")
    assert Task("script", str(script), ("x",)).argv() == [sys.executable, str(script), "x"]
    assert Task("module", "json.tool", ("x",)).argv() == [sys.executable, "-m", "json.tool", "x"]
    assert Task("command", "sh", ("-c", "x")).argv()[1:] == ["-c", "x"]
    assert Task("command", str(script), ()).kind == "command"


def test_what_is_not_there_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match=r"there is no script 'nothing\.py'"):
        Task("script", "nothing.py", ()).argv()
    with pytest.raises(UsageError, match="there is no command 'no-such-command'"):
        Task("command", "no-such-command", ()).argv()
    with pytest.raises(UsageError, match=r"'\.' is a directory without a __main__\.py"):
        Task("script", ".", ()).argv()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nosuchmod", "there is no module 'nosuchmod'"),
        ("json.nosuchmod", "there is no module 'json.nosuchmod'"),
        ("json", "module 'json' is a package without a __main__"),
        ("here.nothing", "there is no module 'here.nothing'"),
    ],
)
def test_a_module_that_is_not_there_is_wrong_usage(tmp_path, monkeypatch, name, text):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=text):
        Task("module", name, ()).argv()


def test_modules_are_found_without_being_imported(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for file in ("mine.py", "here/__init__.py", "here/__main__.py", "here/inner.py"):
        (tmp_path / file).write_text("raise AssertionError('imported')")
    for name in ("mine", "here", "here.inner", "json.tool", "timeit", "this", "pytest"):
        assert Task("module", name, ()).argv() == [sys.executable, "-m", name]
