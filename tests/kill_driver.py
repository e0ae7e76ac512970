"""Runs `anchor` many times but imports it once: each line of standard input is a task in JSON, and so is each answer on
standard output.

A task has the arguments of `anchor`, the `log` for its output, the run `folder` that is watched, and what should happen
to it: `delay` (seconds until kill -9), or an `action` at the `count`-th file operation in the folder whose path
contains `only`. The code `before` is run first. Started by test_kill.py.
"""

import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback

from anchor_embedding.cli.main import main

# what a run would import itself, imported before the processes of the tasks are forked
for name in ("peft", "transformers.models.llama.modeling_llama", "anchor_embedding.train.stage"):
    importlib.import_module(name)

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


# SIGINT is ignored if the tests were started with nohup, or in the background of a shell
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def act(task):
    """Kills this process, makes the current write exceed the limit on file sizes, or sends a
    signal.
    """
    if task["action"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif task["action"] == "write":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (task["bytes"], resource.RLIM_INFINITY))
    else:
        os.kill(os.getpid(), task["action"])


def watch_files(task):
    """Counts the file operations of this process in the folder and acts at one of them."""
    seen = [0]

    def hook(event, arguments):
        writes = (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if not (writes or event in CHANGES):
            return
        path = (
            os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        )
        if path.startswith(task["folder"]) and task.get("only", "") in path:
            seen[0] += 1
            if seen[0] == task.get("count"):
                act(task)

    sys.addaudithook(hook)
    return seen


def child(task):
    """Runs `anchor` with these arguments, as a separate program would."""
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        exec(task.get("before", ""), {})
        seen = watch_files(task)
        code = main(task["arguments"])
        with open(task["log"] + ".count", "w") as file:
            file.write(str(seen[0]))
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(task):
    """Exit code (negative: the signal that ended it) and run time in seconds of a child."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        child(task)
    ended = 0
    while not ended:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if task.get("delay") and time.monotonic() - began >= task["delay"]:
            os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0)
        time.sleep(0 if ended else 0.001)
    return {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - began}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
