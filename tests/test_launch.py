"""Launched processes: their errors, their logs, their end when their watcher ends, and resumed
runs.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file

from anchor_embedding.cli import training
from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import PROSE
from anchor_embedding.train import launch as launching
from anchor_embedding.train.launch import WorkerError, launch
from anchor_embedding.train.recipe import Recipe
from anchor_embedding.train.runs import RunFolder
from anchor_embedding.train.stage import train

WORDS = PROSE.split()
# seconds after which a process that should have ended is taken to hang, on a busy machine too
HANG = 120
# python imports this module when it starts: processes of the ranks FAULT_RANK run FAULT in every
# step
FAULT = """
import os
if "LATE_RANK" in os.environ and os.environ.get("RANK") == os.environ["LATE_RANK"]:
    import time
    import torch.distributed
    torch.distributed.init_process_group = lambda *arguments, **settings: time.sleep(600)
if os.environ.get("RANK", "none") in os.environ.get("FAULT_RANK", ""):
    import itertools
    import torch
    real, count = torch.optim.AdamW.step, itertools.count(1)

    def step(self, *arguments, **settings):
        exec(os.environ["FAULT"], {"step": next(count)})
        return real(self, *arguments, **settings)

    torch.optim.AdamW.step = step
"""
START = "import json, sys; from anchor_embedding.train.launch import launch; from anchor_embedding.train.recipe_files import load_recipe; " \
        "launch(load_recipe(sys.argv[1]), **json.loads(sys.argv[2]), say=lambda text: print(text, flush=True))"  # fmt: skip


@pytest.fixture
def recipe(tmp_path, base, monkeypatch):
    """A small run whose processes can be made to fail."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"query": " ".join(WORDS[i : i + 5]), "positive": " ".join(WORDS[i + 5 : i + 17])}
        for i in range(0, 80, 2)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    return Recipe(
        name="small", objective="reconstruction", base=str(base), data=str(pairs), steps=6, batch_size=8, warmup_steps=2,
        learning_rate=3e-3, max_length=40, dtype="float32", checkpoint_every=2,
    )  # fmt: skip


def fault(monkeypatch, code, rank="1", step=3):
    """Makes the processes of these ranks (digits) run `code` in one step."""
    monkeypatch.setenv(
        "FAULT",
        f"import os, signal, subprocess, time\nif step == {step}:\n    {code}\ntime.sleep(0.03)",
    )
    monkeypatch.setenv("FAULT_RANK", rank)


def quiet(text):
    pass


def hear_interrupts():
    """A process that was started in the background of a shell ignores SIGINT, and so do all its
    children.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(recipe, folder, **settings):
    """A watcher in a separate process."""
    recipe.save(folder / "wanted.toml")
    options = json.dumps({"nproc": 2, "out": str(folder / "run"), **settings})
    command = [sys.executable, "-c", START, str(folder / "wanted.toml"), options]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_interrupts,
    )


def steps(folder):
    path = folder / "run" / "metrics.jsonl"
    return (
        [json.loads(line)["step"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def wait_until(condition, seconds=HANG):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def alive(processes):
    """The processes that still run, among those known to psutil by pid and start time."""
    return [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


# ---- errors


@pytest.mark.parametrize(("code", "error", "words"), [
    pytest.param("from anchor_embedding.common.errors import InputError; raise InputError("
     "'pairs.jsonl:3: nothing there')", InputError,
     ["pairs.jsonl:3: nothing there"],
     marks=pytest.mark.thorough),
    pytest.param("raise ZeroDivisionError('in the third step')", WorkerError,
     ["rank 1 ended with exit code 1", "rank-1.log", "Traceback", "ZeroDivisionError: in the third "
                                                                  "step"],
     marks=pytest.mark.thorough),
    pytest.param("os.kill(os.getpid(), 9)", WorkerError, ["rank 1 was killed by SIGKILL (the system does so "
                                              "when memory runs out)"],
     marks=pytest.mark.thorough),
])  # fmt: skip
def test_error_of_one_rank(tmp_path, recipe, monkeypatch, code, error, words):
    fault(monkeypatch, code)
    before = set(psutil.Process().children(recursive=True))  # processes of other tests
    with pytest.raises(error) as caught:
        launch(recipe, 2, tmp_path / "run", say=quiet)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert not any(word in message for word in ("elastic", "ChildFailedError", "gloo", "anchor: "))
    assert alive(set(psutil.Process().children(recursive=True)) - before) == []
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == [
        "rank-0.log",
        "rank-1.log",
    ]
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-000002"]


def test_a_process_ends_without_the_teardown_of_torch(tmp_path, recipe, monkeypatch):
    """Torch's own teardown sometimes aborts a process that has done all its work."""
    fault(monkeypatch, "import atexit; atexit.register(os.abort)", rank="01")
    launch(recipe, 2, tmp_path / "run", say=quiet)


def test_refused_before_anything_starts(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(launching, "accelerators", lambda: 1)
    with pytest.raises(InputError, match="nproc is 2, but this process can use 1 accelerator;"):
        launch(recipe, 2, tmp_path / "run", say=quiet)
    monkeypatch.setattr(launching, "accelerators", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(InputError, match="started by torchrun"):
        launch(recipe, 2, tmp_path / "run", say=quiet)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(InputError, match="learning_rat"):
        launch(recipe, 2, tmp_path / "run", overrides=["learning_rat=1"], say=quiet)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        launch(recipe, 2, tmp_path / "file", say=quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_a_folder_has_one_run_at_a_time(tmp_path, recipe, monkeypatch):
    """A second run in the same folder says which process has it; when that process is killed, the
    next run continues.
    """
    fault(monkeypatch, "time.sleep(600)", rank="none", step=4)
    running = started(recipe, tmp_path, nproc=1)
    wait_until(lambda: len(steps(tmp_path)) == 3)
    (process,) = psutil.Process(running.pid).children()
    for _ in range(2):
        with pytest.raises(InputError, match=f"is in use by process {process.pid} on"):
            train(recipe, tmp_path / "run", resume=True, progress=False, say=quiet)
    assert steps(tmp_path) == [1, 2, 3]
    process.kill()
    assert running.wait(20) != 0
    train(recipe, tmp_path / "run", resume=True, progress=False, say=quiet)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6] and not list((tmp_path / "run").glob(".*"))


# ---- stopping


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code", "says"), [
    (signal.SIGINT, -signal.SIGINT, "stopped; go on from step"),
    pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, "stopped; go on from step", marks=pytest.mark.slow),
    (signal.SIGKILL, -signal.SIGKILL, ""),
])  # fmt: skip
def test_stopped_watcher_leaves_no_process(tmp_path, recipe, monkeypatch, number, code, says):
    fault(monkeypatch, "subprocess.Popen(['sleep', '600'])", rank="01")
    recipe = recipe.replace(steps=100)
    watcher = started(recipe, tmp_path)
    wait_until(lambda: len(steps(tmp_path)) >= 4)
    processes = psutil.Process(watcher.pid).children(recursive=True)
    assert sum("sleep" in process.cmdline() for process in processes) == 2 and len(processes) == 4
    watcher.send_signal(number)
    said, _ = watcher.communicate(timeout=HANG)
    assert watcher.returncode == code and says in said, said
    wait_until(lambda: not alive(processes))
    assert (
        2 <= RunFolder(tmp_path / "run").newest() < 100
        and not (tmp_path / "run" / "final").exists()
    )
    if number == signal.SIGINT:
        check_that_it_goes_on(tmp_path, recipe, monkeypatch)


def check_that_it_goes_on(tmp_path, recipe, monkeypatch):
    """A run resumed through `launch` ends with the weights and losses of an uninterrupted one."""
    monkeypatch.setenv("FAULT_RANK", "")
    finals = [
        launch(recipe, 2, tmp_path / name, resume=name == "run", say=quiet)
        for name in ("run", "whole")
    ]
    resumed, whole = (load_file(final / "model.safetensors") for final in finals)
    assert [name for name in whole if not whole[name].equal(resumed[name])] == []
    rows = [
        [json.loads(line) for line in (final.parent / "metrics.jsonl").read_text().splitlines()]
        for final in finals
    ]
    resumed, whole = ([(row["step"], row["loss"]) for row in run] for run in rows)
    assert resumed == whole and len(whole) == recipe.steps
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert len(re.findall(r"(?m)^\d{4}-\S+ anchor --debug train .*", log)) == 2


@pytest.mark.thorough
def test_interrupted_cell(tmp_path, recipe, monkeypatch):
    """In a Jupyter kernel a bar and a picture follow the run, and interrupting the cell ends it
    without leaving processes.
    """
    client = pytest.importorskip("jupyter_client.manager")
    fault(monkeypatch, "time.sleep(4)", rank="01", step=40)  # two pictures
    recipe.replace(steps=5000).save(tmp_path / "wanted.toml")
    wanted = str(tmp_path / "wanted.toml")
    out = str(tmp_path / "run")
    manager, kernel = client.start_new_kernel(kernel_name="python3", env=dict(os.environ))
    try:
        asked = kernel.execute(
            f"from anchor_embedding.train.launch import launch\nlaunch({wanted!r}, 2, {out!r})"
        )
        wait_until(lambda: len(steps(tmp_path)) >= 42)
        time.sleep(1)
        processes = psutil.Process(manager.provisioner.process.pid).children(recursive=True)
        manager.interrupt_kernel()
        answer = kernel.get_shell_msg(timeout=HANG)
        while answer["parent_header"]["msg_id"] != asked:  # for a slow start that was asked twice
            answer = kernel.get_shell_msg(timeout=HANG)
        reply = answer["content"]
        seen = []
        while not seen or seen[-1] != ("status", "idle"):
            message = kernel.get_iopub_msg(timeout=10)
            content = message["content"]
            words = (
                json.dumps(content["data"])
                if "data" in content
                else content.get("text") or content.get("execution_state", "")
            )
            seen.append((message["msg_type"], words))
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt"), reply
    assert len(processes) == 2 and not alive(processes)
    kinds = [kind for kind, _ in seen]
    pictures = [words for kind, words in seen if kind.endswith("display_data") and "<svg" in words]
    assert len(pictures) >= 2, kinds
    # a widget, or text if there are no widgets
    shown = "".join(words for kind, words in seen if kind in ("comm_msg", "stream"))
    assert "tokens/s" in shown and "5000" in shown, kinds
    assert (
        "stopping: the processes finish their step and save" in shown and "go on from step" in shown
    ), shown


@pytest.mark.slow
def test_deaf_process_is_killed(tmp_path, recipe, monkeypatch):
    fault(
        monkeypatch, "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); time.sleep(600)"
    )
    watcher = started(recipe, tmp_path, grace=2)
    wait_until(lambda: len(steps(tmp_path)) >= 2)
    time.sleep(0.5)
    processes = psutil.Process(watcher.pid).children(recursive=True)
    watcher.send_signal(signal.SIGINT)
    watcher.communicate(timeout=HANG)
    assert len(processes) == 2 and not alive(processes)


@pytest.mark.thorough
def test_slow_process_holds_nobody_up(tmp_path, recipe, monkeypatch):
    """Rank 1 sees the run folder late, long after rank 0 has written its checkpoint; both still do
    the same.
    """
    late = "import anchor_embedding.train.runs as r; real = r.RunFolder.checkpoints; " \
           "r.RunFolder.checkpoints = lambda self: time.sleep(0.3) or real(self)"  # fmt: skip
    fault(monkeypatch, late, step=1)
    watcher = started(recipe, tmp_path, grace=2)
    try:
        said, _ = watcher.communicate(timeout=HANG)
    finally:
        watcher.send_signal(signal.SIGINT)
    assert watcher.returncode == 0 and steps(tmp_path) == [1, 2, 3, 4, 5, 6], said


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_stopped_before_the_processes_have_met(tmp_path, recipe, monkeypatch, number):
    """A process that waits inside torch for one that never comes ends at once, not after the time
    allowed for saving.
    """
    monkeypatch.setenv("LATE_RANK", "1")
    watcher = started(recipe, tmp_path)
    children = psutil.Process(watcher.pid).children
    wait_until(lambda: len(children()) == 2)
    processes = children()
    wait_until(lambda: any(process.net_connections() for process in processes))
    watcher.send_signal(number)
    wait_until(lambda: not alive(processes), seconds=60)
    watcher.communicate(timeout=HANG)


# ---- more than one machine: torchrun's agents, here two on one


def free_port():
    """A port on which no program listens and which the system does not assign, because it is below
    its range.
    """
    while True:
        port = random.randint(20_000, 30_000)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def agent(folder, port, number):
    """The command that a user types on each machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "1", "--rdzv-id", "small"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["-m", "anchor_embedding", "train", str(folder / "wanted.toml")]
    command += ["--out", str(folder / "run"), "--resume"]
    with open(folder / f"agent-{number}.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def kill_with_children(process):
    """Kills processes as when a machine ends them; its connections are closed."""
    family = [*psutil.Process(process.pid).children(recursive=True), process]
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


@pytest.mark.thorough
def test_a_machine_is_lost_and_the_run_goes_on(tmp_path, recipe, monkeypatch):
    """Two agents of torchrun: one is killed with its process in the middle of the run, the other
    ends, and the same commands start both again.
    """
    fault(monkeypatch, "pass", rank="01")
    monkeypatch.setenv("FAULT", os.environ["FAULT"].replace("0.03", "0.25"))
    recipe.replace(steps=30).save(tmp_path / "wanted.toml")
    logs = [tmp_path / f"agent-{number}.log" for number in range(2)]

    def start_both():
        port = free_port()
        return [agent(tmp_path, port, number) for number in range(2)]

    agents = start_both()
    try:
        wait_until(lambda: len(steps(tmp_path)) >= 4)
        kill_with_children(agents[1])
        assert agents[0].wait(timeout=HANG) != 0
        agents = start_both()
        codes = [process.wait(timeout=HANG) for process in agents]
        assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    finally:
        for process in agents:
            with suppress(psutil.NoSuchProcess):
                kill_with_children(process)
    assert "resumes from step" in logs[0].read_text()
    assert sum("done: " in log.read_text() for log in logs) == 1  # the first process tells it
    assert steps(tmp_path) == [*range(1, 31)]
    assert json.loads((tmp_path / "run" / "card.json").read_text())["processes"] == 2
    straight = recipe.replace(steps=30)
    train(straight, tmp_path / "straight", progress=False, say=quiet)
    whole = load_file(tmp_path / "straight" / "final" / "model.safetensors")
    for name, weight in load_file(tmp_path / "run" / "final" / "model.safetensors").items():
        assert (weight - whole[name]).abs().max() < 1e-3, name


@pytest.mark.thorough
@pytest.mark.parametrize("different", ["seed", "pairs"])
def test_machines_that_differ_are_refused(tmp_path, recipe, different):
    """One machine has another seed, or other pairs under the same name: no step is made, and each says why."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    machines = []
    for rank in (0, 1):
        disk = tmp_path / f"machine-{rank}"
        disk.mkdir()
        lines = Path(recipe.data).read_text().splitlines(keepends=True)
        if different == "pairs":
            lines = lines[rank:] + lines[:rank]
        (disk / "pairs.jsonl").write_text("".join(lines))
        seed = rank if different == "seed" else 0
        recipe.replace(seed=seed, data="pairs.jsonl").save(disk / "wanted.toml")
        command = [sys.executable, "-m", "anchor_embedding", "train", "wanted.toml"]
        machines.append(
            subprocess.Popen(
                [*command, "--out", str(tmp_path / "run")],
                env=os.environ | place | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=disk,
            )
        )
    why = "were given different settings" if different == "seed" else "read different pairs"
    for machine in machines:
        said, _ = machine.communicate(timeout=HANG)
        assert machine.returncode == 2, said
        assert f"anchor: the processes {why}" in said
    assert steps(tmp_path) == [] and not (tmp_path / "run" / "recipe.toml").exists()


@pytest.mark.parametrize(("code", "wanted"), [(143, 143), (137, 1), (3, 1)])
def test_the_command_ends_as_its_processes_did(tmp_path, monkeypatch, code, wanted):
    """Schedulers start a stopped run again by its exit code."""

    def fail(*arguments, **settings):
        raise WorkerError(1, code, "rank 1 ended")

    monkeypatch.setattr(launching, "launch", fail)
    monkeypatch.setattr(training, "_evaluator", lambda args, recipe: None)
    args = SimpleNamespace(eval_tasks=None, tasks_dir=None, nproc=2, resume=False)
    with pytest.raises(SystemExit) as ended:
        training._train_on_many(args, None, tmp_path)
    assert ended.value.code == wanted


def test_messages_of_a_resumed_run_are_passed_on_though_its_log_goes_further(tmp_path):
    """A killed run leaves lines of steps after its checkpoint, until its processes cut them off."""
    line = '{{"step": {}, "loss": 1.0, "tokens": 10, "seconds": 1.0}}\n'.format
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(map(line, range(1, 7))))
    (tmp_path / "cut").write_text("".join(map(line, range(1, 5))))
    (tmp_path / "new").write_text("".join(map(line, (5, 6))))
    begins = "sleep 0.5; echo resumes from step 4; sleep 0.5; mv cut metrics.jsonl; sleep 0.5"
    said = tmp_path / "rank-0.log"
    with said.open("wb") as file:
        goes_on = f"{begins}; cat new >> metrics.jsonl; sleep 0.5; echo done: x"
        process = subprocess.Popen(["sh", "-c", goes_on], stdout=file, cwd=tmp_path)
    lines = []
    worker = launching.Worker(0, process, said, 0)
    six = SimpleNamespace(steps=6, name="run")
    launching.watch([worker], tmp_path, six, 4, False, False, lines.append, tick=0.05)
    assert lines == ["resumes from step 4"]
