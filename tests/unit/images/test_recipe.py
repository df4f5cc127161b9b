"""Recipes: what a good one means, and that every mistake is one sentence that says what and where."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from perdure.core.errors import InvalidRequest, NotFound
from perdure.images.recipe import Recipe, check_size, load_recipe, parse_recipe, shipped_recipes
from perdure.wire.guest.ops import PROGRAM_FILE
from perdure.wire.node import MachineSize


def parse(text: str, beside: Path | None = None) -> Recipe:
    return parse_recipe(text.encode(), where="r.toml", beside=beside)


def test_the_base_recipe_is_shipped_and_has_what_the_guide_promises() -> None:
    assert "base" in shipped_recipes()
    recipe = load_recipe("base")
    assert recipe.name == "base"
    assert {"git", "curl", "python3", "ca-certificates", "procps", "iproute2"} <= set(recipe.packages)
    assert recipe.size == MachineSize(512, 1)


def test_a_complete_recipe() -> None:
    recipe = parse(
        """
        name = "dev"
        packages = ["git", "g++", "nodejs=20.1-1"]
        commands = ["useradd -m agent"]
        environment = { LANG = "C.UTF-8" }
        memory_mib = 1024
        vcpus = 2
        disk_gib = 20
        egress_allow = ["packages.example.org:443", "*.example.org:443", "10.0.0.0/8:80", "[::1]:8080"]
        warm_up = ["git --version"]
        [files."/etc/motd"]
        content = "hello"
        mode = 0o600
        """
    )
    assert (recipe.memory_mib, recipe.vcpus, recipe.disk_gib) == (1024, 2, 20)
    assert recipe.files[0].path == "/etc/motd"
    assert recipe.files[0].content == b"hello"
    assert recipe.files[0].mode == 0o600


def test_a_source_file_lies_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "motd").write_bytes(b"\xff\x00")
    (tmp_path / "r.toml").write_text('name = "x"\n[files."/etc/motd"]\nsource = "motd"\n')
    assert load_recipe(str(tmp_path / "r.toml")).files[0].content == b"\xff\x00"


def test_sources_may_be_sent_along_with_a_recipe() -> None:
    text = b'name = "x"\n[files."/m"]\nsource = "sub/motd"\n'
    recipe = parse_recipe(text, where="r.toml", beside=None, sources={"sub/motd": b"\xff\x00"})
    assert recipe.files[0].content == b"\xff\x00"


def test_a_recipe_extends_a_shipped_one() -> None:
    base = load_recipe("base")
    recipe = parse(
        """
        extends = "base"
        name = "mine"
        packages = ["git", "gcc"]
        environment = { LANG = "C", A = "b" }
        memory_mib = 700
        commands = ["true"]
        [files."/etc/pip.conf"]
        content = "mine"
        """
    )
    assert recipe.packages == (*base.packages, "gcc")
    assert recipe.environment == {**base.environment, "LANG": "C", "A": "b"}
    assert (recipe.memory_mib, recipe.disk_gib) == (700, base.disk_gib)
    assert recipe.commands == ("true",)
    assert recipe.warm_up == base.warm_up
    assert {file.path: file.content for file in recipe.files}["/etc/pip.conf"] == b"mine"
    assert {file.path for file in recipe.files} == {file.path for file in base.files}
    assert parse('extends = "base"\nname = "other"').digest == base.digest


def test_the_recipe_dev_is_base_with_a_compiler() -> None:
    recipe, base = load_recipe("dev"), load_recipe("base")
    assert "build-essential" in recipe.packages
    assert set(base.packages) < set(recipe.packages)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_an_image_of_its_name_on_base(name: str) -> None:
    recipe, base = load_recipe(name), load_recipe("base")
    assert recipe.name == name
    assert set(base.packages) <= set(recipe.packages)
    assert {file.path for file in base.files} <= {file.path for file in recipe.files}
    assert recipe.min_memory_mib <= recipe.memory_mib
    assert recipe.egress_allow == (), "a workspace reaches nothing that nobody named"


def test_the_least_memory_is_taken_over_and_says_what_it_contradicts() -> None:
    assert parse('name = "x"').min_memory_mib == 128
    assert parse('name = "x"\nmin_memory_mib = 512').min_memory_mib == 512
    browser = load_recipe("browser")
    assert parse('name = "x"\nextends = "browser"').min_memory_mib == browser.min_memory_mib > 512
    with pytest.raises(InvalidRequest, match=f"min_memory_mib is {browser.min_memory_mib}, which is more than memory_mib, 512"):
        parse('name = "x"\nextends = "browser"\nmemory_mib = 512')


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_scripts_of_shipped_recipes_are_shell(name: str, tmp_path: Path) -> None:
    for file in load_recipe(name).files:
        if file.content.startswith(b"#!/bin/sh\n"):
            checked = subprocess.run(["sh", "-n"], input=file.content, capture_output=True, check=False)
            assert (checked.returncode, checked.stderr) == (0, b""), file.path


@pytest.mark.parametrize(
    ("command", "does"),
    [
        ("reboot", "sync;b"),
        ("reboot -f", "sync;b"),
        ("reboot --help", "usage"),
        ("poweroff", "sync;o"),
        ("shutdown", "sync;o"),
        ("shutdown -h now", "sync;o"),
        ("shutdown -r now", "sync;b"),
        ("shutdown -c", "usage"),
        ("shutdown +5", "usage"),
    ],
)
def test_base_has_commands_that_reboot_and_turn_off(command: str, does: str, tmp_path: Path) -> None:
    (tmp_path / "sync").write_text("#!/bin/sh\nprintf 'sync;'\n")
    for file in load_recipe("base").files:
        path = tmp_path / file.path.rpartition("/")[2]
        text = file.content.decode().replace("/usr/local/sbin", str(tmp_path)).replace("> /proc/sysrq-trigger", "")
        path.write_text(text)
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", f"{tmp_path}/{command}"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert does in (done.stdout + done.stderr)
    assert (done.returncode == 0) == (does != "usage")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "x"\nextends = "nope"', "which is no shipped recipe"),
        ('name = "x"\nextends = ["base"]', "which is no shipped recipe"),
        ('name = "x"\n[files."/m"]\nsource = "a\\u0000b"', "that is no file name"),
    ],
)
def test_extending_and_sources_complain_clearly(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(text, beside=tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = ", "is not TOML"),
        ("", "name is None"),
        ('name = "Base"', "'Base'"),
        ('name = "../x"', "'../x'"),
        ('name = "x"\npackage = ["git"]', "'package' is not a key"),
        ('name = "x"\npackages = "git"', "packages is not a list"),
        ('name = "x"\npackages = ["git; rm -rf /"]', "is not a Debian package name"),
        ('name = "x"\npackages = ["--purge"]', "is not a Debian package name"),
        ('name = "x"\ncommands = [""]', "'' in commands"),
        ('name = "x"\ncommands = [1]', "1 in commands"),
        ('name = "x"\nmemory_mib = 64', "memory_mib is 64, but must be between 128"),
        ('name = "x"\nmemory_mib = "512"', "memory_mib is '512', not a whole number"),
        ('name = "x"\nmemory_mib = true', "memory_mib is True"),
        ('name = "x"\nmin_memory_mib = 64', "min_memory_mib is 64, but must be between 128"),
        ('name = "x"\nmin_memory_mib = "1G"', "min_memory_mib is '1G', not a whole number"),
        ('name = "x"\nmin_memory_mib = 1024', "min_memory_mib is 1024, which is more than memory_mib, 512"),
        ('name = "x"\nvcpus = 0', "vcpus is 0"),
        ('name = "x"\ndisk_gib = 0', "disk_gib is 0"),
        ('name = "x"\negress_allow = ["packages.example.org"]', "'packages.example.org' in egress_allow is not HOST:PORT"),
        ('name = "x"\negress_allow = ["http://packages.example.org:443"]', "is not HOST:PORT"),
        ('name = "x"\nenvironment = ["A=1"]', "environment is not a table"),
        ('name = "x"\nenvironment = { "A-B" = "1" }', "A-B"),
        ('name = "x"\nenvironment = { A = 1 }', "no variable with a text value"),
        ('name = "x"\nfiles = []', "files is not a table"),
        ('name = "x"\n[files."etc/motd"]\ncontent = ""', "not a plain absolute path"),
        ('name = "x"\n[files."/etc/../motd"]\ncontent = ""', "not a plain absolute path"),
        ('name = "x"\n[files."/etc//motd"]\ncontent = ""', "not a plain absolute path"),
        ('name = "x"\n[files."/m"]\nmode = 0o600', "exactly one of content and source"),
        ('name = "x"\n[files."/m"]\ncontent = ""\nsource = ""', "exactly one of content and source"),
        ('name = "x"\n[files."/m"]\ncontent = ""\nowner = 1', "unknown key 'owner'"),
        ('name = "x"\n[files."/m"]\ncontent = ""\nmode = 0o100000', "has the mode"),
        ('name = "x"\n[files."/m"]\ncontent = 1', "is not text"),
        ('name = "x"\n[files."/m"]\nsource = "m"', "did not come with the recipe"),
    ],
)
def test_every_mistake_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(text)
    assert says in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_a_missing_source_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="'nowhere' of the file /m cannot be read"):
        parse('name = "x"\n[files."/m"]\nsource = "nowhere"', tmp_path)


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(InvalidRequest, match=r"r\.toml is not TOML"):
        parse_recipe(b"\xff\xfe", where="r.toml", beside=None)


def test_an_unknown_recipe_lists_the_shipped_ones() -> None:
    with pytest.raises(NotFound, match="no recipe named 'bas'; Perdure ships base"):
        load_recipe("bas")


def test_a_recipe_file_that_is_not_there() -> None:
    with pytest.raises(NotFound, match=r"nowhere/r\.toml cannot be read"):
        load_recipe("nowhere/r.toml")


def test_comments_name_and_package_order_do_not_change_the_digest() -> None:
    first = parse('name = "a"\npackages = ["git", "curl"]')
    second = parse('# why\nname = "b"\npackages = ["curl", "git"]')
    assert first.digest == second.digest


@pytest.mark.parametrize(
    ("line", "changes_root"),
    [
        ('packages = ["curl"]', True),
        ('commands = ["true"]', True),
        ("disk_gib = 9", True),
        ('[files."/m"]\ncontent = "x"', True),
        ("memory_mib = 513", False),
        ("min_memory_mib = 200", False),
        ("vcpus = 2", False),
        ('warm_up = ["true"]', False),
        ('environment = { A = "1" }', False),
        ('egress_allow = ["a:1"]', False),
    ],
)
def test_every_other_key_changes_the_digest(line: str, changes_root: bool) -> None:
    plain, changed = parse('name = "a"'), parse(f'name = "a"\n{line}')
    assert plain.digest != changed.digest
    assert (plain.root_digest != changed.root_digest) is changes_root


def test_sizes_that_cannot_boot_say_the_bound() -> None:
    assert check_size(MachineSize(128, 1)) == MachineSize(128, 1)
    with pytest.raises(InvalidRequest, match="memory_mib is 127, but must be between 128 and"):
        check_size(MachineSize(127, 1))
    with pytest.raises(InvalidRequest, match="vcpus is 65"):
        check_size(MachineSize(512, 65))


# -------------------------------------------------------------------------------------------------------------- program

PROGRAM = """
name = "x"
[program]
argv = ["python3", "/srv/a.py"]
env = { A = "1" }
cwd = "/srv"
user = "nobody"
port = 9000
restart = "on-failure"
stop_grace_s = 2.5
"""


def test_a_program_is_a_file_of_the_root_disk_and_so_of_the_digest() -> None:
    (file,) = parse(PROGRAM).files
    assert (file.path, file.mode) == (PROGRAM_FILE, 0o644)
    assert json.loads(file.content) == {
        "argv": ["python3", "/srv/a.py"],
        "env": {"A": "1"},
        "cwd": "/srv",
        "user": "nobody",
        "port": 9000,
        "restart": "on-failure",
        "stop_grace_s": 2.5,
    }
    recipes = [parse(text) for text in (PROGRAM, PROGRAM.replace("9000", "9001"), 'name = "x"')]
    assert len({recipe.root_digest for recipe in recipes}) == len({recipe.digest for recipe in recipes}) == 3
    assert parse('name = "x"').digest == parse('name = "x"\ncommands = []').digest


def test_a_recipe_that_extends_another_keeps_or_replaces_its_program() -> None:
    assert [file.path for file in parse('name = "x"\nextends = "base"\n[program]\nargv = ["a"]').files].count(PROGRAM_FILE) == 1
    defaults = json.loads(parse('name = "x"\n[program]\nargv = ["a"]').files[0].content)
    assert (defaults["port"], defaults["restart"], defaults["stop_grace_s"]) == (8080, "always", 10)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("program = 3", "program is not a table"),
        ("[program]", "needs at least its first word"),
        ('[program]\nargv = "a"', "argv is not a list"),
        ('[program]\nargv = ["a", 3]', "3 in argv is not a word"),
        ('[program]\nargv = ["a"]\ncolour = "red"', "'colour' is not a key"),
        ('[program]\nargv = ["a"]\nport = 0', "port is 0"),
        ('[program]\nargv = ["a"]\nrestart = "sometimes"', "restart is 'sometimes'"),
        ('[program]\nargv = ["a"]\nrestart = 1', "restart is 1"),
        ('[program]\nargv = ["a"]\nstop_grace_s = "2"', "not a number of seconds"),
        ('[program]\nargv = ["a"]\nstop_grace_s = -1', "must be between 0 and 3600"),
        ('[program]\nargv = ["a"]\nstop_grace_s = nan', "must be between 0 and 3600"),
        ('[program]\nargv = ["a"]\nenv = ["A"]', "env is not a table"),
        ('[program]\nargv = ["a"]\nenv = { A = 1 }', "env has A = 1"),
        ('[program]\nargv = ["a"]\ncwd = 3', "cwd is 3"),
        ('[program]\nargv = ["a"]\nuser = ""', "user is ''"),
        (f'[program]\nargv = ["a"]\n[files."{PROGRAM_FILE}"]\ncontent = ""', "name the same thing"),
    ],
)
def test_a_mistake_in_a_program_is_one_sentence(line: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(complaint)) as caught:
        parse(f'name = "x"\n{line}')
    assert caught.value.message.startswith("r.toml") and caught.value.hint
