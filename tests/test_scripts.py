"""The scripts a newcomer runs first, as far as they can be tried without an installation."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = ["scripts/setup.sh", "scripts/test.sh", "scripts/demo.sh", ".ci/run"]


@pytest.fixture
def checkout(tmp_path, repository):
    """A checkout with the scripts alone, whose .venv has a stand-in for pip."""
    folder = tmp_path / "check out"
    shutil.copytree(repository / "scripts", folder / "scripts")
    shutil.copy(repository / "pyproject.toml", folder)
    return folder


def setup(checkout, **environment):
    return subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=checkout,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def pretend_venv(checkout, pip_status=0):
    """A .venv whose python runs, and whose pip only notes its arguments."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/bash\n"
        'if [[ "$*" == *"-m pip install"* ]]; then\n'
        '    echo "pip chatter"; echo "$*" >>calls\n'
        f"    exit {pip_status}\n"
        "fi\n"
        '[[ "$*" == *"-m pip"* ]] && exit 0\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)


def calls(checkout):
    noted = checkout / "calls"
    return noted.read_text().splitlines() if noted.exists() else []


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse_and_can_be_executed(script, repository):
    subprocess.run(["bash", "-n", str(repository / script)], check=True)
    assert os.access(repository / script, os.X_OK)


def test_a_missing_python_is_one_sentence(checkout):
    result = setup(checkout, PYTHON="no-such-python")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("setup: k3tune needs Python 3.11 or newer with its venv module")
    assert "no-such-python" in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (checkout / ".venv").exists()


def test_an_old_python_is_refused(checkout):
    old = checkout / "old-python"
    old.write_text("#!/bin/bash\nexit 1\n")
    old.chmod(0o755)
    result = setup(checkout, PYTHON=str(old))
    assert result.returncode == 1 and "needs Python 3.11" in result.stderr


def test_torch_is_pinned_in_the_one_install_command(checkout):
    pretend_venv(checkout)
    result = setup(checkout)
    assert result.returncode == 0, result.stderr
    [call] = calls(checkout)
    assert "torch==" in call and call.endswith("--editable .[dev,demo,serve]")
    assert "pip chatter" not in result.stdout + result.stderr


def test_a_second_setup_does_nothing_and_does_it_quickly(checkout):
    pretend_venv(checkout)
    setup(checkout)
    # of the processor: a busy machine makes nobody's script slow
    before = sum(os.times()[2:4])
    result = setup(checkout)
    assert sum(os.times()[2:4]) - before < 2
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert len(calls(checkout)) == 1


def test_a_changed_project_file_installs_again(checkout):
    pretend_venv(checkout)
    setup(checkout)
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    setup(checkout)
    assert len(calls(checkout)) == 2


def test_a_failed_installation_shows_its_log_and_is_tried_again(checkout):
    pretend_venv(checkout, pip_status=1)
    for attempt in (1, 2):
        result = setup(checkout)
        assert result.returncode == 1 and "pip chatter" in result.stderr
        assert len(calls(checkout)) == attempt


def test_another_python_than_that_of_the_environment_is_refused(checkout):
    pretend_venv(checkout)
    other = checkout / "other-python"
    other.write_text('#!/bin/bash\n[[ "$*" == *version_info\\[* ]] && echo 3.99\nexit 0\n')
    other.chmod(0o755)
    result = setup(checkout, PYTHON=str(other))
    assert result.returncode == 1
    assert "Python 3.99 but .venv holds" in result.stderr


def test_the_checks_run_the_test_command_of_the_readme(repository):
    command = "bash scripts/test.sh"
    assert command in (repository / "README.md").read_text()
    assert (repository / ".ci" / "run").read_text().splitlines()[-1] == command
    workflow = repository / ".github" / "workflows" / "cpu.yml"
    assert f"run: {command}" in Path(workflow).read_text()
