"""Bad inputs for every command, from small generators.

`python tests/fuzz_inputs.py` runs all of them and writes `tests/fuzz.json`: how many there are by
command and kind, and which of them show a fault. The answer to a bad input is right if the exit
code is 2, one line says what is wrong, and nothing was written or changed. `tests/test_fuzz.py`
runs a sample.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from anchor_embedding.cli.main import main
from anchor_embedding.common.provenance import device_name, source_commit
from anchor_embedding.common.tiny import PROSE, tiny_model, tiny_tokenizer

RESULTS = Path(__file__).with_name("fuzz.json")
WORDS = PROSE.split()


@dataclass(frozen=True)
class Case:
    """A bad input: a command line, and what is done to the good files before it runs."""

    command: str
    kind: str
    name: str
    words: tuple[str, ...]  # {} stands for the folder of the good files
    damage: Callable[[Path], None] | None = None

    @property
    def key(self) -> str:
        return f"{self.command} · {self.kind} · {self.name}"


# ---- the command lines, with all argument names

SMALL = "batch_size=8 max_length=40 steps=2 dtype=float32 warmup_steps=0".split()
SETTINGS = ("--set", "base={}/base", *SMALL)
PAIRS = "{}/pairs.jsonl"
OUT = "{}/out"
GOOD = {
    "train": ("train", "baseline", *SETTINGS, "--data", PAIRS, "--out", OUT),
    "tournament": (
        *("tournament", "--recipes", "quickstart", "--amount", "2", "--heldout", "10"),
        *("--data", PAIRS, "--out", OUT, *SETTINGS),
    ),
    "quickstart": (
        *("quickstart", "--base", "{}/base", "--data", PAIRS, "--steps", "2", "--out", OUT),
        *("--set", *SMALL[:2], "dtype=float32"),
    ),
    "eval": ("eval", "{}/model", "--tasks-dir", "{}/tasks", "--out", OUT, "--dtype", "float32"),
    "sweep": ("sweep", "{}/run", "--tasks-dir", "{}/tasks", "--dtype", "float32"),
    "soft-tokens": (
        *("soft-tokens", "{}/model", "--data", PAIRS, "--heldout", "10", "--out", OUT),
    ),
    "plan": ("plan", "baseline", *SETTINGS, f"data={PAIRS}"),
    "bench": ("bench", "stage2", "--shape", "tiny", "--rounds", "1", "--out", OUT),
    "aa-check": (
        *("aa-check", "--tournaments", "2", "--seeds", "6", "--runs", "12", "--steps", "1"),
        *("--runs-dir", "{}/aa", "--out", OUT),
    ),
    "mine": ("mine", "--data", PAIRS, "--out", "{}/out.jsonl"),
    "encode": ("encode", "{}/model", "--in", "{}/texts.txt", "--out", OUT, "--dtype", "float32"),
    "index": ("index", "{}/vectors"),
    "search": ("search", "{}/model", "{}/vectors", "a question", "--dtype", "float32"),
    "export": ("export", "{}/model", "--out", OUT),
    "check": ("check", "--data", PAIRS),
    "ceiling": ("ceiling", "{}/model", "--data", PAIRS, "--pairs", "4", "--out", OUT),
    "compare": (
        "compare",
        "{}/scores.json",
        "--paper",
        "Llama-3.2-1B-Instruct",
        "--out",
        "{}/out.md",
    ),
    "read": ("read", "{}/model", "a text", "--dtype", "float32", "--tokens", "4"),
    "recipes": ("recipes", "{}/recipe.toml"),
}


def altered(command: str, **values: str) -> tuple[str, ...]:
    """A good command line with the values of some options changed, or added at the end."""
    words = list(GOOD[command])
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [f"{option}={value}"]
    return tuple(words)


def moved(command: str, old: str, new: str) -> tuple[str, ...]:
    """A good command line with one path replaced."""
    assert old in GOOD[command], (command, old)
    return tuple(new if word == old else word for word in GOOD[command])


# ---- the good files


def make_good(folder: Path) -> None:
    """What every command needs: a base model, pairs, a run, vectors, tasks and scores."""
    model = tiny_model("llama")
    model.save_pretrained(folder / "base")
    tiny_tokenizer("smollm2").save_pretrained(folder / "base")
    rows = [
        {"query": " ".join(WORDS[i : i + 5]), "positive": " ".join(WORDS[i + 5 : i + 17])}
        for i in range(0, 80, 2)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "pairs.jsonl").write_text(text)
    (folder / "texts.txt").write_text("\n".join(row["positive"] for row in rows[:12]) + "\n")
    sts = folder / "tasks" / "sts" / "STS12"
    sts.mkdir(parents=True)
    pairs = [
        {"sentence1": row["query"], "sentence2": row["positive"], "score": i / 2}
        for i, row in enumerate(rows[:6])
    ]
    (sts / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    _run_well(folder, "train", "baseline", *SETTINGS, "checkpoint_every=1",
              "--data", PAIRS, "--out", "{}/run")  # fmt: skip
    shutil.copytree(folder / "run" / "final", folder / "model")
    shutil.copytree(folder / "run" / "step-000002", folder / "adapter")
    (folder / "adapter" / "optimizer.safetensors").unlink()
    _run_well(folder, *altered("encode", out="{}/vectors", shard_size="5"))
    _run_well(folder, "index", "{}/vectors")
    _run_well(folder, *altered("eval", out="{}/evaluated"))
    (scores,) = folder.glob("evaluated/*/scores.json")
    shutil.copy(scores, folder / "scores.json")
    shutil.rmtree(folder / "evaluated")
    shutil.copy(folder / "run" / "recipe.toml", folder / "recipe.toml")


def _run_well(folder: Path, *words: str) -> None:
    found = run(words, folder)
    assert found.code == 0, found


# ---- running


@dataclass
class Met:
    """How a command ended."""

    code: int
    errors: str


SECONDS = 60  # the maximum for a bad input


def _too_long(*_):
    raise TimeoutError(f"it still runs after {SECONDS} seconds")


def run(words: tuple[str, ...], folder: Path) -> Met:
    """Runs a command in this process."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    words = [word.replace("{}", str(folder)) for word in words]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            code = 1
            print(f"ESCAPED {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            signal.alarm(0)
    return Met(code, errors.getvalue())


def state(folder: Path) -> dict[str, str]:
    """Every path in a folder, with a digest of its content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = "link" if path.is_symlink() else "file" if path.is_file() else "other"
        content = path.read_bytes() if kind == "file" else b""
        found[str(path.relative_to(folder))] = kind + hashlib.sha256(content).hexdigest()[:16]
    return found


def fault_of(case: Case, good: Path, scratch: Path) -> str:
    """What is wrong with the command's answer to a case; "" if nothing is."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(good, scratch)
    if case.damage:
        case.damage(scratch)
    before = state(scratch)
    met = run(case.words, scratch)
    lines = [line for line in met.errors.splitlines() if line.startswith("anchor")]
    if met.code != 2:
        return f"exit code {met.code}: {' / '.join(met.errors.splitlines()[-2:])[-400:]}"
    if "Traceback" in met.errors or len([line for line in lines if ": " in line]) != 1:
        return f"not one line: {met.errors[-400:]}"
    after = state(scratch)
    changed = [path for path in {*before, *after} if before.get(path) != after.get(path)]
    # lock files, which hold nothing, tell other processes that one is running
    locks = [path for path in changed if path.endswith(".lock")]
    changed = [path for path in changed if path not in locks]
    if locks and changed == [str(Path(locks[0]).parent)]:
        changed = []
    if case.kind == "task":  # the other tasks are scored, and the error is stored among the scores
        changed = [path for path in changed if not path.startswith(("out", "run/ev"))]
    return f"written: {sorted(changed)[:4]}" if changed else ""


# ---- damages


def put(path: str, content: bytes | str) -> Callable[[Path], None]:
    """Writes a file, creating its folders."""

    def damage(folder):
        target = folder / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        target.write_bytes(data)

    return damage


def without(path: str) -> Callable[[Path], None]:
    """Removes a file or a folder."""

    def damage(folder):
        target = folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return damage


def folder_at(path: str) -> Callable[[Path], None]:
    """Puts a folder where a file is expected."""

    def damage(folder):
        without(path)(folder) if (folder / path).exists() else None
        (folder / path).mkdir(parents=True)

    return damage


def broken_link(path: str) -> Callable[[Path], None]:
    """Puts a broken link in the place of a file."""

    def damage(folder):
        without(path)(folder) if (folder / path).exists() else None
        (folder / path).symlink_to(folder / "nowhere")

    return damage


def cut(path: str, share: float) -> Callable[[Path], None]:
    """Cuts a file short."""

    def damage(folder):
        data = (folder / path).read_bytes()
        (folder / path).write_bytes(data[: int(len(data) * share)])

    return damage


def overwritten(path: str, share: float, length: int = 8) -> Callable[[Path], None]:
    """Changes bytes of a file but not its size."""

    def damage(folder):
        data = bytearray((folder / path).read_bytes())
        start = min(int(len(data) * share), len(data) - length)
        for place in range(start, start + length):
            data[place] ^= 0xFF
        (folder / path).write_bytes(bytes(data))

    return damage


def set_json(path: str, key: str, value) -> Callable[[Path], None]:
    """Changes a value in a JSON file."""

    def damage(folder):
        content = json.loads((folder / path).read_text())
        content[key] = value
        (folder / path).write_text(json.dumps(content))

    return damage


# content that is not a JSON object
NO_OBJECT = {
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "number": b"7",
    "string": b'"text"',
    "cut": b'{"a": ',
    "nul": b"\x00" * 64,
    "latin-1": b'{"a": "\xe9"}',
    "deep": b"[" * 20_000,
    "mark": b"\xff\xfe{\x00}\x00",
}


# ---- cases


def _damaged(command: str, kind: str, words, path: str, which=None) -> Iterator[Case]:
    """A file whose content is not a JSON object, a folder in its place, and a broken link."""
    for name, content in NO_OBJECT.items():
        if which is None or name in which:
            yield Case(command, kind, f"{path} {name}", words, put(path, content))
    yield Case(command, kind, f"{path} is a folder", words, folder_at(path))


def numbers() -> Iterator[Case]:
    """Options that take a number, with something else or an impossible number."""
    whole = {
        "quickstart": ["steps", "seeds"],
        "train": ["nproc"],
        "tournament": ["heldout", "seeds"],
        "soft-tokens": ["refine-steps", "heldout", "seed", "max-length"],
        "aa-check": ["tournaments", "seeds", "runs", "steps"],
        "plan": ["nproc"],
        "eval": ["max-length"],
        "sweep": ["every", "max-length"],
        "read": ["samples", "tokens", "seed", "max-length"],
        "bench": ["rounds", "pairs"],
        "ceiling": ["pairs", "first-tokens", "token-budget", "seed", "max-length"],
        "encode": ["nproc", "shard-size", "batch-tokens", "max-length"],
        "index": ["partitions"],
        "search": ["top", "probes"],
        "mine": ["num-negatives", "range-min", "range-max", "seed", "max-length"],
    }
    for command, names in whole.items():
        for name in names:
            for value in ("-1", "1.5", "nan", "many", "", "-99999999999999999999999"):
                words = altered(command, **{name: value})
                yield Case(command, "number", f"--{name} {value!r}", words)
    fractions = {
        "tournament": ["amount", "every"],
        "mine": ["relative-margin", "absolute-margin", "max-score", "min-score"],
    }
    for command, names in fractions.items():
        for name in names:
            for value in ("nan", "inf", "-inf", "many"):
                words = altered(command, **{name: value})
                yield Case(command, "number", f"--{name} {value}", words)
    for name, value in (("amount", "0"), ("amount", "-2"), ("every", "0"), ("every", "-1")):
        yield Case(
            "tournament", "number", f"--{name} {value}", altered("tournament", **{name: value})
        )
    zero = {
        "quickstart": ["steps", "seeds"],
        "train": ["nproc"],
        "tournament": ["heldout", "seeds"],
        "soft-tokens": ["refine-steps", "heldout"],
        "aa-check": ["tournaments", "seeds", "runs", "steps"],
        "plan": ["nproc"],
        "bench": ["rounds", "pairs"],
        "read": ["tokens"],
        "ceiling": ["pairs", "first-tokens", "token-budget"],
        "encode": ["nproc", "shard-size", "batch-tokens", "max-length"],
        "index": ["partitions"],
        "search": ["top"],
        "mine": ["num-negatives", "range-max"],
    }
    for command, names in zero.items():
        for name in names:
            yield Case(command, "number", f"--{name} 0", altered(command, **{name: "0"}))


def words_of_options() -> Iterator[Case]:
    """Options that take a word, with a wrong one, and options that do not exist."""
    for command, words in GOOD.items():
        yield Case(command, "usage", "unknown option", (*words, "--no-such-option"))
        yield Case(command, "usage", "a word too many", (words[0], "--out"))
    for command in ("eval", "sweep", "encode", "read", "ceiling", "search", "mine", "soft-tokens"):
        yield Case(command, "choice", "--dtype", altered(command, dtype="float8"))
        model = "{}/model" if command == "mine" else None
        words = altered(command, device="gpu", **({"model": model} if model else {}))
        yield Case(command, "choice", "--device gpu", words)
        words = altered(command, device="cuda:99", **({"model": model} if model else {}))
        yield Case(command, "choice", "--device cuda:99", words)
    for command, name, value in (
        ("eval", "prompts", "mine"),
        ("eval", "tasks", "NoSuchTask"),
        ("eval", "tasks", ","),
        ("sweep", "tasks", "NoSuchTask"),
        ("encode", "template", "none"),
        ("encode", "vector-dtype", "int8"),
        ("encode", "columns", "id"),
        ("encode", "columns", "text,text"),
        ("encode", "columns", "nothing"),
        ("tournament", "budget", "money"),
        ("tournament", "part", "train"),
        ("tournament", "alternative", "both"),
        ("tournament", "recipes", "no-such-recipe"),
        ("mine", "sampling", "worst"),
        ("mine", "instructions", "no-such"),
        ("mine", "on-bad-row", "laugh"),
        ("mine", "model", "{}/nowhere"),
        ("mine", "corpus", "{}/nowhere.jsonl"),
        ("mine", "relative-margin", "some"),
        ("bench", "shape", "huge"),
        ("compare", "paper", "GPT-9"),
        ("plan", "gpu", "abacus"),
        ("export", "format", "gguf"),
        ("read", "decode-opening", "other"),
        ("search", "probes", "3"),
    ):
        yield Case(command, "choice", f"--{name} {value}", altered(command, **{name: value}))
    yield Case("bench", "choice", "kind", ("bench", "stage3", *GOOD["bench"][2:]))
    for name in ("no-such-recipe", "smollm2-135m/", "{}", "{}/nowhere.toml", "", "\x01"):
        yield Case("train", "choice", f"recipe {name!r}", ("train", name, *GOOD["train"][2:]))
        yield Case("plan", "choice", f"recipe {name!r}", ("plan", name, *GOOD["plan"][2:]))


def paths() -> Iterator[Case]:
    """Paths that do not exist, are too long, are broken links or are of the wrong kind."""
    long = "{}/" + "x" * 300
    very_long = "{}/" + "/".join(["x" * 200] * 30)
    inputs = {
        "train": [PAIRS], "tournament": [PAIRS], "quickstart": [PAIRS, "{}/base"],
        "eval": ["{}/model", "{}/tasks"], "sweep": ["{}/run", "{}/tasks"],
        "soft-tokens": ["{}/model"], "mine": [PAIRS], "encode": ["{}/model", "{}/texts.txt"],
        "index": ["{}/vectors"], "search": ["{}/model", "{}/vectors"], "export": ["{}/model"],
        "check": [PAIRS], "ceiling": ["{}/model", PAIRS], "compare": ["{}/scores.json"],
        "read": ["{}/model"], "recipes": ["{}/recipe.toml"],
    }  # fmt: skip
    for command, places in inputs.items():
        for place in places:
            base = place.removeprefix("{}/")
            for name, path in (
                ("is not there", "{}/nowhere/" + base),
                ("too long", long + Path(base).suffix),
                ("far too long", very_long + Path(base).suffix),
                ("below a file", PAIRS + "/" + base),
            ):
                yield Case(command, "path", f"{base} {name}", moved(command, place, path))
            if base not in ("pairs.jsonl", "base", "tasks") or command == "check":
                link = broken_link(base)
                yield Case(command, "path", f"{base} is a broken link", GOOD[command], link)
            words = moved(command, place, "{}/empty")
            yield Case(command, "path", f"{base} empty folder", words, folder_at("empty"))
    for command, place in (
        ("train", OUT), ("tournament", OUT), ("eval", OUT), ("encode", OUT), ("export", OUT),
        ("quickstart", OUT), ("mine", "{}/out.jsonl"), ("compare", "{}/out.md"),
        ("ceiling", OUT), ("bench", OUT), ("aa-check", OUT),
    ):  # fmt: skip
        words = moved(command, place, "{}/pairs.jsonl/below" + Path(place).suffix)
        yield Case(command, "out", "below a file", words)
        yield Case(command, "out", "too long", moved(command, place, long + Path(place).suffix))
    for command in ("train", "tournament", "eval", "encode", "export", "quickstart"):
        yield Case(command, "out", "a file for a folder", GOOD[command], put("out", "mine\n"))
    for command, path in (("mine", "out.jsonl"), ("compare", "out.md"), ("ceiling", "out"),
                          ("bench", "out"), ("aa-check", "out")):  # fmt: skip
        yield Case(command, "out", "a folder for a file", GOOD[command], folder_at(path))
    yield Case("encode", "out", "a full folder", GOOD["encode"], put("out/other", "x"))
    yield Case("export", "out", "a full folder", GOOD["export"], put("out/other", "x"))
    yield Case("mine", "out", "is there", GOOD["mine"], put("out.jsonl", "x"))
    for suffix in (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt", ".npz", ".pt"):
        yield Case("encode", "out", suffix, moved("encode", OUT, "{}/v" + suffix))
    for suffix in (".csv", ".txt", ".json", ""):
        yield Case("mine", "out", f"out{suffix}", moved("mine", "{}/out.jsonl", "{}/v" + suffix))
    for suffix in (".docx", ".xls", ""):
        yield Case("compare", "out", f"out{suffix}", moved("compare", "{}/out.md", "{}/v" + suffix))
    for suffix in ("txt", "docx", "html"):
        words = (*GOOD["check"], "--plot", "{}/picture." + suffix)
        yield Case("check", "out", f"--plot .{suffix}", words)
    yield Case("check", "out", "--plot folder", (*GOOD["check"], "--plot", "{}/tasks"))


GOOD_ROW = '{"query": "a", "positive": "b"}\n'
BAD_ROWS = {
    "empty": b"", "blank lines": b"\n\n\n", "no json": b"hello\n", "list": b"[1, 2]\n",
    "null": b"null\n", "number": b"5\n", "string": b'"a"\n', "no positive": b'{"query": "a"}\n',
    "no query": b'{"positive": "a"}\n', "number as query": b'{"query": 5, "positive": "b"}\n',
    "null query": b'{"query": null, "positive": "b"}\n',
    "list as positive": b'{"query": "a", "positive": {"x": 1}}\n',
    "empty query": b'{"query": "", "positive": "b"}\n',
    "blank positive": b'{"query": "a", "positive": "  "}\n',
    "negatives hold numbers": b'{"query": "a", "positive": "b", "negatives": [1]}\n',
    "dataset is a number": b'{"query": "a", "positive": "b", "dataset": 5}\n',
    "latin-1": b'{"query": "\xe9", "positive": "b"}\n',
    "utf-16": '{"query": "a", "positive": "b"}\n'.encode("utf-16"),
    "nul bytes": b"\x00" * 100 + b"\n", "deep": b"[" * 50_000 + b"\n",
    "huge number": b'{"query": ' + b"9" * 5000 + b', "positive": "b"}\n',
    "nan": b'{"query": NaN, "positive": "b"}\n', "cut": b'{"query": "a", "posi',
    "two on a line": b'{"query": "a", "positive": "b"} {"query": "a"}\n',
    "surrogate": b'{"query": "\\ud800", "positive": 5}\n',
    "infinity": b'{"query": Infinity, "positive": "b"}\n',
}  # fmt: skip


def _table(columns: dict) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def data() -> Iterator[Case]:
    """Unreadable files of pairs and texts, for the commands that read them."""
    for name, content in BAD_ROWS.items():
        rows = content if name in ("empty", "blank lines") else (GOOD_ROW * 3).encode() + content
        for command in ("check", "train", "mine"):
            yield Case(command, "jsonl", name, GOOD[command], put("pairs.jsonl", rows))
    for command in ("ceiling", "tournament", "quickstart"):
        for name in ("empty", "no json", "latin-1", "deep", "null query"):
            yield Case(command, "jsonl", name, GOOD[command], put("pairs.jsonl", BAD_ROWS[name]))
    packed = gzip.compress((GOOD_ROW * 500).encode())
    wrong_text = _table({"query": ["aaaaaa"], "positive": ["bb"]}).replace(
        b"aaaaaa", b"\xff\xfe\xfd\xff\xfe\xfd"
    )
    whole = _table({"query": ["a"] * 50, "positive": ["b"] * 50})
    other_files = {
        "pairs.csv": {
            "no header": "a,b\n1,2\n", "short row": "query,positive\na,b\nc\n", "empty": "",
            "long row": "query,positive\na,b,c\n", "header only": "query,positive\n",
            "open quote": 'query,positive\n"a,b\n', "twice": "query,query,positive\na,b,c\n",
            "latin-1": b"query,positive\n\xe9,b\n", "nul": b"query,positive\na\x00,\n",
            "negatives": "query,positive,negatives\na,b,c\n",
        },
        "pairs.jsonl.gz": {
            "cut": packed[: len(packed) // 2], "no gzip": GOOD_ROW, "empty": b"",
            "head alone": packed[:10], "wrong end": packed[:-8] + b"\0" * 8,
            "latin-1": gzip.compress(BAD_ROWS["latin-1"]),
        },
        "pairs.parquet": {
            "empty": b"", "text": GOOD_ROW, "cut": whole[:-20], "cut early": whole[:30],
            "invalid UTF-8": wrong_text, "no columns": _table({"x": ["a"]}),
            "numbers": _table({"query": [1, 2], "positive": [3, 4]}),
            "lists": _table({"query": [["a"]], "positive": [["b"]]}),
            "nulls": _table({"query": ["a", None], "positive": ["b", "c"]}),
            "no rows": _table({"query": pa.array([], pa.string()), "positive": pa.array([], pa.string())}),
            "overwritten": whole[:4] + b"\xff" * 40 + whole[44:],
        },
        "pairs.xyz": {"unknown kind": "a"},
        "pairs.txt": {"text": "a text\n"},
    }  # fmt: skip
    for path, contents in other_files.items():
        for name, content in contents.items():
            for command in ("check", "train"):
                words = moved(command, PAIRS, "{}/" + path)
                yield Case(command, "data file", f"{path} {name}", words, put(path, content))
    texts = {
        "t.jsonl": {"no text": '{"a": 1}\n', "number": '{"text": 5}\n', "list": "[]\n",
                    "latin-1": b'{"text": "\xe9"}\n', "cut": '{"text": "a', "deep": "[" * 50_000,
                    "empty": "", "id twice": '{"id": "1", "text": "a"}\n' * 2,
                    "id is a list": '{"id": [], "text": "a"}\n', "null": '{"text": null}\n'},
        "t.txt": {"latin-1": b"caf\xe9\n", "empty": b"", "utf-16": "text".encode("utf-16")},
        "t.txt.gz": {"no gzip": "a text\n", "cut": packed[:40]},
        "t.csv": {"no text": "a,b\n1,2\n", "short": "text,id\na\n", "empty": ""},
        "t.parquet": {"text": "a", "no text": _table({"x": ["a"]}), "numbers": _table({"text": [1]}),
                      "cut": whole[:-9], "invalid UTF-8": wrong_text},
        "t.json": {"list": "[]"}, "t.pdf": {"pdf": b"%PDF-1.4\xff\xfe"},
    }  # fmt: skip
    for path, contents in texts.items():
        for name, content in contents.items():
            words = moved("encode", "{}/texts.txt", "{}/" + path)
            yield Case("encode", "texts", f"{path} {name}", words, put(path, content))
            if not path.endswith((".csv", ".parquet")) and not name.startswith("id "):
                words = (*GOOD["mine"], "--corpus", "{}/" + path)
                yield Case("mine", "texts", f"{path} {name}", words, put(path, content))


MODEL_VALUES = {
    "config.json": [
        ("hidden_size", -1), ("hidden_size", "big"), ("hidden_size", 31), ("hidden_size", 64),
        ("num_hidden_layers", 3), ("num_hidden_layers", None), ("num_attention_heads", 0),
        ("vocab_size", 10), ("vocab_size", "x"), ("model_type", "no_such"), ("model_type", 5),
        ("model_type", "bert"), ("model_type", "t5"), ("intermediate_size", 7),
        ("hidden_act", "none"), ("rope_parameters", {"rope_type": "odd"}),
        ("num_key_value_heads", 3), ("head_dim", 0), ("max_position_embeddings", "long"),

    ],
    "tokenizer_config.json": [("tokenizer_class", 5)],
    "tokenizer.json": [("model", None), ("model", {"type": "odd"}), ("added_tokens", "x"),
                       ("version", 9), ("pre_tokenizer", 7)],
}  # fmt: skip


def models() -> Iterator[Case]:
    """Folders of models with missing or damaged files."""
    for command in ("encode", "read"):
        for path in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            yield from _damaged(command, "model file", GOOD[command], f"model/{path}")
    for path in ("anchor_embedding.json",):
        for command in ("encode", "export"):
            yield from _damaged(command, "model file", GOOD[command], f"model/{path}")
    for path, values in MODEL_VALUES.items():
        for key, value in values:
            damage = set_json(f"model/{path}", key, value)
            yield Case("encode", "model value", f"{path} {key}={value}", GOOD["encode"], damage)
    weights = "model/model.safetensors"
    for command in ("encode", "read", "export", "search"):
        words = GOOD[command]
        for share in (0, 0.001, 0.3, 0.999):
            yield Case(command, "weights", f"cut at {share}", words, cut(weights, share))
        for place in (0, 0.0005, 0.01):
            yield Case(
                command, "weights", f"overwritten at {place}", words, overwritten(weights, place)
            )
        yield Case(command, "weights", "missing", words, without(weights))
        yield Case(command, "weights", "a folder", words, folder_at(weights))

        def pickled(folder):
            (folder / weights).unlink()
            put("model/pytorch_model.bin", b"\x80\x02cos\nsystem\n(S'true'\ntR.")(folder)

        yield Case(command, "weights", "pickled", words, pickled)
    for command in ("encode", "export"):
        words = moved(command, "{}/model", "{}/adapter")
        path = "adapter/adapter_model.safetensors"
        config = "adapter/adapter_config.json"
        for share in (0, 0.01, 0.5, 0.99):
            yield Case(command, "adapter", f"cut at {share}", words, cut(path, share))
        yield Case(command, "adapter", "missing", words, without(path))
        yield Case(command, "adapter", "no config", words, without(config))
        for key, value in (
            ("r", 3), ("r", "x"), ("r", 0), ("base_model_name_or_path", "{}/nowhere"),
            ("base_model_name_or_path", None), ("base_model_name_or_path", 5), ("peft_type", "ODD"),
            ("peft_type", None), ("target_modules", ["no_such"]), ("target_modules", None),
            ("task_type", "ODD"),
        ):  # fmt: skip
            yield Case(command, "adapter", f"{key}={value}", words, set_json(config, key, value))
        yield from _damaged(command, "adapter", words, config)


BAD_SETTINGS = """steps=0 steps=-1 steps=1.5 steps=many steps=nan steps= batch_size=0 batch_size=-8
batch_size=x learning_rate=0 learning_rate=-1 learning_rate=nan learning_rate=inf learning_rate=x
warmup_steps=-1 warmup_steps=x schedule_steps=-1 weight_decay=-1 weight_decay=nan beta1=1 beta1=-1
beta2=1 beta2=x epsilon=0 epsilon=-1 max_grad_norm=0 max_grad_norm=nan seed=-1 seed=x seed=4294967296
seed=1.5 tuning=some lora_rank=0 lora_alpha=-1 lora_dropout=1 lora_targets=[]
dtype=float8 token_budget=0 token_budget=-1 token_budget=x sharding=all activation_checkpointing=x
compile=x checkpoint_every=-1 checkpoint_every=x keep_checkpoints=-1 eval_every=-1 tracker=mine
max_length=0 max_length=7 max_length=x max_length=-5 template=odd pooling=cls pooling=5
attention=sideways prompt=nothing prompt={text prompt= eos_token=nosuch objective=odd objective=5
instructions=nosuch instructions={}/nowhere.csv on_bad_row=laugh name= base= data= no_such=1
learning_rat=1 step=5 lr=1e-4 hard_negatives=-1 hard_negatives=x temperature=0 temperature=-1
temperature=nan temperature=inf margin=nan decode_opening=odd alpha=2 sampling=x sampling=a:-1
sampling=nosuch:1""".split()


def settings() -> Iterator[Case]:
    """Every setting of a recipe with values of a wrong kind, on the command line and in a file."""
    for word in BAD_SETTINGS:
        yield Case("train", "setting", word, (*GOOD["train"], "--set", word))
    for word in BAD_SETTINGS[::3]:
        if "nowhere" in word:  # neither command reads the file
            continue
        yield Case("plan", "setting", word, (*GOOD["plan"], "--set", word))
        yield Case("recipes", "setting", word, ("recipes", "baseline", "--set", word))
    for word in BAD_SETTINGS[1::8]:
        yield Case("tournament", "setting", word, (*GOOD["tournament"], "--set", word))
        yield Case("quickstart", "setting", word, (*GOOD["quickstart"], "--set", word))
    contradictions = [
        ["tuning=full", "lora_rank=4"], ["tuning=lora", "lora_targets=['no_such']"],
        ["schedule_steps=1", "warmup_steps=5"], ["sharding=fsdp", "tuning=lora", "lora_rank=0"],
        ["pooling=eos", "attention=bidirectional", "pooling=odd"], ["warmup_steps=9", "steps=x"],
    ]  # fmt: skip
    for pair in contradictions[:2] + contradictions[3:]:
        yield Case("train", "setting", " ".join(pair), (*GOOD["train"], "--set", *pair))
    words = ("train", "{}/recipe.toml", "--out", OUT)
    text = 'name = "x"\n'
    for name, content in {
        "empty": "", "latin-1": b'name = "\xe9"\n', "no toml": "hello", "list": "[]",
        "cut": 'name = "x', "nul": b"\x00", "twice": text + text, "unknown": text + "no_such = 1\n",
        "wrong kind": text + "steps = 'five'\n", "table": text + "[steps]\na = 1\n", "utf-16": text.encode("utf-16"),
        "date": text + "steps = 2020-01-01\n", "missing": text, "nan": text + "learning_rate = nan\n",
        "deep": "a = " + "[" * 5000, "number as name": "name = 5\n", "extends itself": 'extends = "recipe.toml"\n',
        "stages": 'stages = 5\n', "arms": "arms = []\n", "base number": text + "base = 5\n",
    }.items():  # fmt: skip
        yield Case("train", "recipe file", name, words, put("recipe.toml", content))
        yield Case("recipes", "recipe file", name, GOOD["recipes"], put("recipe.toml", content))
    for word in ("sets", "=", "steps", "a.b=1"):
        yield Case("train", "setting", f"--set {word}", (*GOOD["train"], f"--set={word}"))


def runs() -> Iterator[Case]:
    """Run folders whose files are damaged."""
    resume = ("train", "--resume", "{}/run")
    newest = "run/step-000002"
    for share in (0, 0.01, 0.5, 0.99):
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):
            yield Case(
                "train", "run", f"{name} cut at {share}", resume, cut(f"{newest}/{name}", share)
            )
    for name, content in {
        "empty object": "{}\n", "list": "[]\n", "null": "null\n", "number": "5\n", "text": "hello\n",
        "step is text": '{"step": "x"}\n', "step is null": '{"step": null}\n', "nul": b"\x00\n",
        "latin-1": b'{"step": "\xe9"}\n', "deep": "[" * 30_000 + "\n",
    }.items():  # fmt: skip
        yield Case("train", "run log", f"metrics {name}", resume, put("run/metrics.jsonl", content))
        yield Case("train", "run log", f"evals {name}", resume, put("run/evals.jsonl", content))
        yield Case(
            "sweep", "run log", f"evals {name}", GOOD["sweep"], put("run/evals.jsonl", content)
        )
    for path in ("run/recipe.toml",):
        for name, content in {
            "empty": "",
            "latin-1": b"name = '\xe9'",
            "text": "hello",
            "nul": b"\0",
        }.items():
            yield Case("train", "run", f"{path} {name}", resume, put(path, content))
    yield Case("train", "run", "recipe missing", resume, without("run/recipe.toml"))
    yield Case("train", "run", "recipe is a folder", resume, folder_at("run/recipe.toml"))
    yield Case("train", "run", "metrics is a folder", resume, folder_at("run/metrics.jsonl"))
    yield Case("train", "run", "holds a run", moved("train", OUT, "{}/run"))
    yield from _damaged(
        "train", "run", resume, "run/card.json", ("cut", "list", "latin-1", "deep", "null")
    )

    def no_checkpoints(folder):
        for path in (folder / "run").glob("step-*"):
            shutil.rmtree(path)

    yield Case("train", "run", "no checkpoints", resume, no_checkpoints)
    yield Case("sweep", "run", "every=7", altered("sweep", every="7"))


def scored() -> Iterator[Case]:
    """Task folders and score files that are damaged."""
    task = "tasks/sts/STS12"
    contents = {
        "empty": "", "no json": "hello\n", "list": "[]\n", "null": "null\n", "latin-1": b'{"a": "\xe9"}\n',
        "score is text": '{"sentence1": "a", "sentence2": "b", "score": "5"}\n',
        "no score": '{"sentence1": "a", "sentence2": "b"}\n', "deep": "[" * 30_000,
        "number": '{"sentence1": 5, "sentence2": "b", "score": 1}\n',
        "nan": '{"sentence1": "a", "sentence2": "b", "score": NaN}\n', "nul": b"\x00\n",
    }  # fmt: skip
    for name, content in contents.items():
        for command in ("eval", "sweep"):
            yield Case(command, "task", name, GOOD[command], put(f"{task}/pairs.jsonl", content))
    for name, content in {
        "empty": "", "list": "[]", "null": "null", "instruction is a number": '{"instruction": 5}',
        "cut": "{", "latin-1": b'{"a": "\xe9"}',
        "deep": "[" * 30_000,
    }.items():  # fmt: skip
        yield Case(
            "eval",
            "task",
            f"meta.json {name}",
            GOOD["eval"],
            put("tasks/sts/STS12/meta.json", content),
        )

    def tiny_gz(folder):
        without(f"{task}/pairs.jsonl")(folder)
        put(f"{task}/pairs.jsonl.gz", b"\x1f\x8b")(folder)

    yield Case("eval", "task", "tiny gz", GOOD["eval"], tiny_gz)
    yield Case("eval", "task", "no files", GOOD["eval"], without(f"{task}/pairs.jsonl"))
    yield Case("eval", "task", "file is a folder", GOOD["eval"], folder_at(f"{task}/pairs.jsonl"))
    row = '{"_id": "1", "text": "a"}\n'

    def retrieval(**files):
        def damage(folder):
            target = folder / "tasks" / "retrieval" / "SciFact"
            target.mkdir(parents=True)
            files_there = {
                "corpus.jsonl": row,
                "queries.jsonl": row,
                "qrels.tsv": "q\td\ts\n1\t1\t1\n",
            }
            for name, content in (files_there | files).items():
                if content is not None:
                    (target / name).write_text(content)

        return damage

    for name in ("corpus.jsonl", "queries.jsonl", "qrels.tsv"):
        for content in (None, "", "hello\n", "1\t2\n", "[]\n"):
            damage = retrieval(**{name: content})
            yield Case("eval", "task", f"{name} {content!r}", GOOD["eval"], damage)
    yield from _damaged("compare", "scores", GOOD["compare"], "scores.json")
    export = (*GOOD["export"], "--scores", "{}/scores.json")
    yield from _damaged("export", "scores", export, "scores.json")
    for key, value in (("tasks", None), ("tasks", []), ("tasks", 5), ("tasks", {"STS12": 5}),
                       ("tasks", {"STS12": {"main_score": "high"}}), ("tasks", {"STS12": {}})):  # fmt: skip
        damage = set_json("scores.json", key, value)
        yield Case("compare", "scores", f"{key}={value}", GOOD["compare"], damage)
        yield Case("export", "scores", f"{key}={value}", export, damage)


def vectors() -> Iterator[Case]:
    """Encoded corpora and indexes that are damaged."""
    for command in ("search", "index"):
        words = GOOD[command]
        yield from _damaged(command, "manifest", words, "vectors/corpus.json")
        for key, value in (
            ("documents", -1), ("documents", "many"), ("documents", 13), ("documents", None),
            ("dimension", 5), ("dimension", "x"), ("dimension", 0), ("settings", None), ("settings", []),
            ("settings", {"shard_size": 0}), ("settings", {"shard_size": "x", "columns": 5}),
            ("known_vector", "x"), ("known_vector", [1.0]), ("text", None), ("text", 5),
        ):  # fmt: skip
            if command == "search" or key not in ("known_vector", "text"):
                damage = set_json("vectors/corpus.json", key, value)
                yield Case(command, "manifest", f"{key}={value}", words, damage)
        shard = "vectors/shard-00001.parquet"
        for share in (0, 0.1, 0.5, 0.99):
            yield Case(command, "shard", f"cut at {share}", words, cut(shard, share))
        for place in (0.02, 0.1, 0.2, 0.3, 0.4, 1):
            yield Case(
                command, "shard", f"overwritten at {place}", words, overwritten(shard, place)
            )
        yield Case(command, "shard", "missing", words, without(shard))
        yield Case(command, "shard", "a folder", words, folder_at(shard))

        def swapped(folder, shard=shard):
            shutil.copy(folder / "vectors/shard-00000.parquet", folder / shard)

        yield Case(command, "shard", "another one", words, swapped)
    words = (
        "encode",
        *GOOD["encode"][1:5],
        "{}/vectors",
        "--dtype",
        "float32",
        "--shard-size",
        "5",
        "--resume",
    )
    assert words[3:5] == ("{}/texts.txt", "--out"), words
    yield Case("encode", "manifest", "other texts", words, put("texts.txt", "other\n" * 12))
    yield Case("encode", "manifest", "other settings", (*words, "--normalize"))
    approximate = (*GOOD["search"], "--approximate")
    yield Case("search", "index", "missing", approximate, without("vectors/index"))
    for value in ("0", "-1", "x"):
        yield Case("search", "index", f"--probes {value}", (*approximate, f"--probes={value}"))


def all_cases() -> list[Case]:
    """Every bad input once."""
    makers = (numbers, words_of_options, paths, data, models, settings, runs, scored, vectors)
    cases = [case for maker in makers for case in maker()]
    return list({case.key: case for case in cases}.values())


@contextlib.contextmanager
def workplace() -> Iterator[tuple[Path, Path]]:
    """(good files, a folder for damaged copies), with a separate cache."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:
        place = Path(made).resolve()
        before = os.environ.get("ANCHOR_CACHE")
        os.environ["ANCHOR_CACHE"] = str(place / "cache")
        working = os.getcwd()
        (place / "working").mkdir()
        os.chdir(place / "working")
        try:
            # made in the place where the copies will be, so that paths in them stay valid
            (place / "scratch").mkdir()
            make_good(place / "scratch")
            (place / "scratch").rename(place / "good")
            yield place / "good", place / "scratch"
        finally:
            os.chdir(working)
            os.environ.pop("ANCHOR_CACHE")
            if before is not None:
                os.environ["ANCHOR_CACHE"] = before


def record(faults: dict[str, str], cases: list[Case]) -> dict:
    """The stored summary of a complete run."""
    about = {
        "command": "python tests/fuzz_inputs.py",
        "commit": source_commit(),
        "device": device_name(torch.device("cpu")),
        "date": time.strftime("%Y-%m-%d"),
        "inputs": len(cases),
        "faults": len(faults),
    }
    commands = Counter(case.command for case in cases)
    kinds = Counter(case.kind for case in cases)
    return {"about": about, "commands": commands, "kinds": kinds, "faults": faults}


def faults_of_part(part: int, parts: int, words: list[str]) -> dict[str, str]:
    """Every `parts`-th case whose key contains all the words."""
    chosen = [case for case in all_cases() if all(word in case.key for word in words)]
    found = {}
    with workplace() as (good, scratch), open(os.devnull, "w") as nowhere:
        for case in chosen[part::parts]:
            with contextlib.redirect_stderr(nowhere):
                fault = fault_of(case, good, scratch)
            if fault:
                found[case.key] = fault
                print(f"{case.key}\n    {fault}", flush=True)
    return found


if __name__ == "__main__":
    PARTS = 2
    found = {}
    with ProcessPoolExecutor(PARTS, get_context("spawn")) as pool:
        for faults in pool.map(
            partial(faults_of_part, parts=PARTS, words=sys.argv[1:]), range(PARTS)
        ):
            found |= faults
    print(f"{len(found)} faults")
    if len(sys.argv) == 1:
        RESULTS.write_text(json.dumps(record(found, all_cases()), indent=1) + "\n")
