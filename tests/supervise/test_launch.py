import os
import subprocess
import sys

from penstock.supervise import launch


def test_one_whose_parent_is_gone_already_does_not_start() -> None:
    stranger = os.getppid()
    done = subprocess.run(
        [sys.executable, "-I", "-S", launch.__file__, str(stranger), "echo", "alive"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "the supervisor has ended\n")


def test_it_becomes_the_command() -> None:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), "sh", "-c", "echo $$"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.read()) == process.pid


def test_what_the_command_makes_is_its_owners_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), "sh", "-c", "umask"],
        capture_output=True,
        text=True,
        umask=0o022,
    )
    assert done.stdout == "0077\n"
