"""A corpus encoded by a real Ray on this machine: two actors, one of which is killed in the middle."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pyarrow.parquet as pq
import pytest
from notebook_checks import ROOT

from anchor_embedding.common.tiny import PROSE
from anchor_embedding.embed.embedder import Embedder

COUNT = 240
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is the extra [ray]")
JOB = """
import os, signal, sys, time
from pathlib import Path
import ray
from anchor_embedding.embed.batch_encoder import BatchEncoder

home, texts = Path(sys.argv[1]), sys.argv[2]

class Killed(BatchEncoder):
    "Kills its own process at its second batch, once in the whole job."

    calls = 0

    def __call__(self, batch):
        made = super().__call__(batch)
        self.calls += 1
        with open(home / "calls", "a") as file:
            file.write(f"{os.getpid()} {self.embedder.decoder.device} {len(made['vector'])}\\n")
        if self.calls == 2:
            try:
                os.close(os.open(home / "killed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)  # so that both actors have something to do
        return made

ray.init(
    address="local",
    num_cpus=2,
    object_store_memory=80 * 2**20,
    include_dashboard=False,
    log_to_driver=False,
    _temp_dir=sys.argv[3],
)
context = ray.data.DataContext.get_current()
context.enable_progress_bars = False
context.target_max_block_size = 2**20  # the store is small
rows = ray.data.read_json(texts, override_num_blocks=8)
vectors = rows.map_batches(
    Killed,
    fn_constructor_kwargs={"model": str(home / "model"), "dtype": "float32"},
    batch_size=10,
    num_cpus=0.5,  # one is left for reading and writing
    compute=ray.data.ActorPoolStrategy(size=2),
)
vectors.write_parquet(str(home / "vectors"))
ray.shutdown()
"""


def run_job(home, texts, short) -> subprocess.CompletedProcess:
    """The job in a separate process, without the network."""
    (home / "job.py").write_text(JOB)
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    quiet["RAY_worker_niceness"] = (
        "0"  # on a busy machine Ray's default of 15 would wait for minutes
    )
    return subprocess.run(
        [sys.executable, home / "job.py", home, texts, short],
        env=os.environ | quiet | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )


def write_rows(path, texts) -> None:
    rows = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts)]
    path.write_text("\n".join(rows) + "\n")


@pytest.fixture
def short(tmp_path_factory):
    """A folder for Ray's sockets, whose paths must be short."""
    return tmp_path_factory.mktemp("r")


@pytest.mark.thorough
@needs_ray
def test_two_actors_one_of_them_killed(base, tmp_path, short):
    """Every text occurs once, with the vector that it has on its own."""
    model = Embedder.from_pretrained(base, dtype="float32")
    model.save_pretrained(tmp_path / "model")
    words = PROSE.split()
    texts = [" ".join(words[i % 50 : i % 50 + 3 + i % 11]) + f" {i}" for i in range(COUNT)]
    write_rows(tmp_path / "texts.jsonl", texts)
    done = run_job(tmp_path, tmp_path / "texts.jsonl", short)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    # two actors and the replacement of the killed one; no GPU was requested
    assert len({pid for pid, _, _ in calls}) >= 3, calls
    assert {device for _, device, _ in calls} == {"cpu"}
    # the work of the killed actor is repeated
    assert (tmp_path / "killed").exists() and sum(int(rows) for _, _, rows in calls) > COUNT
    table = pq.read_table(tmp_path / "vectors").sort_by("id")
    assert table["id"].to_pylist() == [*range(COUNT)]
    assert table["text"].to_pylist() == texts
    vectors = np.array(table["vector"].to_pylist(), dtype=np.float32)
    one_by_one = np.stack([model.encode(text) for text in texts])
    np.testing.assert_allclose(vectors, one_by_one, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_the_package_does_not_import_ray():
    code = "import sys, anchor_embedding.embed.batch_encoder; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
