"""A pass over texts is kept, resumed, merged and shared without changing what it sums, and never taken for another."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tiny import NUM_LAYERS, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text

from ridgefill import _core
from ridgefill.capture import BlockInputs
from ridgefill.cli.main import commands
from ridgefill.errors import FitError
from ridgefill.moments import Moments
from ridgefill.sample import Sample, listed_texts, merge_files
from ridgefill.solve import fit, fit_sums, sum_texts

D, WINDOW, HEAD = 32, 96, 4
ROWS = WINDOW - HEAD
# 16 windows are fitted, 2 held out and summed too, for lambda.
WINDOWS = 18
PASS: dict[str, Any] = {"window_tokens": WINDOW, "features": ("stream", "previous:1")}
SOLUTION: dict[str, Any] = {"features": ("stream", "previous:1"), "gains": "none", "ridge_lambda": "auto"}
EVERY = 4
TESTS = Path(__file__).parent


def model(**overrides: Any) -> Any:
    return tiny_model("llama", hidden_size=D, **overrides)


def texts(first: int = 0, count: int = WINDOWS) -> list[str]:
    """Texts of one window each."""
    return [random_text(WINDOW, seed) for seed in range(first, first + count)]


def whole_fit(checkpoint: Path | None = None) -> Any:
    arguments = (model(), byte_tokenizer(), texts(), (1, 3))
    return fit(*arguments, **{**PASS, **SOLUTION}, checkpoint=checkpoint, checkpoint_rows=EVERY * ROWS)


def summed(some: list[str] | None = None, path: Path | None = None, **settings: Any) -> Sample:
    chosen = texts() if some is None else some
    return sum_texts(model(), byte_tokenizer(), chosen, (1, 3), checkpoint=path, **{**PASS, **settings})


class Killed(Exception):
    """What a test kills a fit with."""


class Runs:
    """Counts forward passes over windows; kills the one with number ``die_at``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.die_at = 0, -1
        run = BlockInputs.run

        def counted(inputs: BlockInputs, ids: Any) -> Any:
            if self.count == self.die_at:
                raise Killed
            self.count += 1
            return run(inputs, ids)

        monkeypatch.setattr(BlockInputs, "run", counted)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The map file of a fit that nobody interrupts and that keeps no checkpoint."""
    path = tmp_path_factory.mktemp("expected") / "maps.safetensors"
    whole_fit().save(path)
    return path.read_bytes()


def assert_same_sums(found: Sample, wanted: Sample, **tolerance: float) -> None:
    theirs = wanted._all_sums()
    for stem, moments in found._all_sums().items():
        mine, other = moments.centred(), theirs[stem].centred()
        assert mine.n == other.n
        for name in ("x_mean", "y_mean", "sxx", "sxy", "syy"):
            torch.testing.assert_close(
                getattr(mine, name), getattr(other, name), **(tolerance or {"rtol": 0, "atol": 0})
            )


# --- killed and resumed -----------------------------------------------------------------------------------------------


def test_a_fit_killed_at_any_window_gives_the_same_file_and_repeats_an_interval_at_most(
    tmp_path: Path, runs: Runs, expected: bytes
) -> None:
    whole_fit()
    figures = runs.count - WINDOWS  # held-out windows run again for figures, after the pass
    assert figures > 0
    repeated = []
    for die_at in range(WINDOWS + figures):
        checkpoint, maps = tmp_path / f"{die_at}.moments", tmp_path / f"{die_at}.safetensors"
        runs.count, runs.die_at = 0, die_at
        with pytest.raises(Killed):
            whole_fit(checkpoint)
        runs.count, runs.die_at = 0, -1
        whole_fit(checkpoint).save(maps)
        assert maps.read_bytes() == expected, die_at
        # Of the pass: what was run before and again. What comes after it is done anew from the sums.
        repeated.append(min(die_at, WINDOWS) + runs.count - figures - WINDOWS)
    assert max(repeated) == EVERY - 1
    assert repeated[EVERY] == 0
    assert repeated[WINDOWS:] == [0] * figures


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, runs: Runs, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = _core.write_map_file, []

    def fails_once(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(_core, "write_map_file", fails_once)
    checkpoint, maps = tmp_path / "sums.moments", tmp_path / "maps.safetensors"
    with pytest.raises(OSError, match="No space left"):
        whole_fit(checkpoint)
    assert Sample.load(checkpoint).windows == 2 * EVERY
    whole_fit(checkpoint).save(maps)
    assert maps.read_bytes() == expected


def test_a_killed_process_is_resumed_by_another(tmp_path: Path, runs: Runs, expected: bytes) -> None:
    checkpoint, maps = tmp_path / "sums.moments", tmp_path / "maps.safetensors"
    code = (
        "import os, signal, sys\n"
        f"sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]\n"
        "import torch\n"
        "torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "import test_sample\n"
        "run, count = test_sample.BlockInputs.run, []\n"
        "def dies(inputs, ids):\n"
        "    count.append(1)\n"
        "    if len(count) == 12:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return run(inputs, ids)\n"
        "test_sample.BlockInputs.run = dies\n"
        f"test_sample.whole_fit(Path({str(checkpoint)!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=900, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["sums.moments"]
    whole_fit(checkpoint).save(maps)
    assert maps.read_bytes() == expected
    assert runs.count == WINDOWS - 2 * EVERY + 4


def test_a_finished_pass_is_not_run_again(tmp_path: Path, runs: Runs) -> None:
    path = tmp_path / "sums.moments"
    first = summed(path=path)
    assert runs.count == WINDOWS - 2  # no held-out sums were asked for
    written = path.read_bytes()
    again = summed(path=path)
    assert runs.count == WINDOWS - 2
    assert path.read_bytes() == written
    assert_same_sums(again, first)
    assert (again.rows, again.texts, again.chain) == (first.rows, first.texts, first.chain)
    assert [w.ids for w in again.held_out_windows] == [w.ids for w in first.held_out_windows]


# --- taken for another ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window_tokens": 80}, "window_tokens: 96, here 80"),
        ({"head": 3}, "head: 4, here 3"),
        ({"features": ("stream",)}, "features: "),
        ({"held_out": 0}, "held_out: 0.0625, here 0"),
        ({"held_out_sums": True}, "held_out_sums: False, here True"),
        ({"max_tokens": 900}, "max_tokens: None, here 900"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    path = tmp_path / "sums.moments"
    summed(path=path)
    with pytest.raises(FitError, match=f"sums.moments: holds the sums of another pass .*{words}"):
        summed(path=path, **settings)


def test_a_checkpoint_of_another_model_or_of_other_splits_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "sums.moments"
    summed(path=path)
    for other, splits, words in (
        (model(seed=1), (1, 3), r"\(model.anchors: "),
        (model().to(torch.bfloat16), (1, 3), "dtype: float32, here bfloat16"),
        (model(), (1, 2), r"splits: \[1, 3\], here \[1, 2\]"),
    ):
        with pytest.raises(FitError, match=words):
            sum_texts(other, byte_tokenizer(), texts(), splits, checkpoint=path, **PASS)
    moved = model()
    moved.config._name_or_path = "elsewhere/moved"
    sum_texts(moved, byte_tokenizer(), texts(), (1, 3), checkpoint=path, **PASS)


def test_a_checkpoint_of_other_texts_is_refused(tmp_path: Path, runs: Runs) -> None:
    path = tmp_path / "sums.moments"
    summed(path=path)
    before = runs.count
    for other, words in (
        ([*texts()[:7], random_text(WINDOW, 99), *texts()[8:]], "differ from the 18 windows"),
        (texts(count=17), "hold less than the 18 windows"),
        (texts(count=19), "hold more than the 18 windows"),
        (texts()[::-1], "differ from"),
    ):
        with pytest.raises(FitError, match=words):
            summed(other, path)
    assert runs.count == before


def test_what_is_no_whole_moments_file_is_refused(tmp_path: Path, runs: Runs) -> None:
    path, maps = tmp_path / "sums.moments", tmp_path / "maps.safetensors"
    fit(model(), byte_tokenizer(), texts(), (3,), window_tokens=WINDOW, features=("stream",), gains="none").save(maps)
    with pytest.raises(FitError, match=r"expected a moments file .*found {'format': 'ridgefill'"):
        Sample.load(maps)
    runs.count, runs.die_at = 0, 6
    with pytest.raises(Killed):
        sum_texts(model(), byte_tokenizer(), texts(), (1, 3), checkpoint=path, checkpoint_rows=EVERY * ROWS, **PASS)
    with pytest.raises(FitError, match=r"its pass over the texts is not finished \(5 windows so far\)"):
        fit_sums(model(), byte_tokenizer(), path)
    with pytest.raises(FitError, match="not finished"):
        merge_files([path, path])
    sample = Sample.load(path)
    sample.settings["features"] = ["stream"]
    sample.save(path)
    with pytest.raises(FitError, match=r"damaged .*expected a tensor x_sum \[32\], found \[64\]"):
        Sample.load(path)


# --- solved again -----------------------------------------------------------------------------------------------------


def test_other_lambdas_splits_and_features_are_solved_without_another_pass(tmp_path: Path, runs: Runs) -> None:
    path = tmp_path / "sums.moments"
    whole_fit(path)
    before = runs.count
    common: dict[str, Any] = {"features": PASS["features"], "gains": "lsq", "dtype": torch.float32}
    found = fit_sums(model(), byte_tokenizer(), path, (3,), ridge_lambda=0.1, **common)
    assert runs.count - before == 4  # held-out windows, for figures
    assert list(found.splits) == [3]
    arguments = (model(), byte_tokenizer(), texts())
    wanted = fit(*arguments, (1, 3), ridge_lambda=0.1, window_tokens=WINDOW, **common)
    assert found.fit == wanted.fit
    for layer, layer_map in wanted.splits[3].layers.items():
        mine = found.splits[3].layers[layer]
        assert torch.equal(mine.weight, layer_map.weight)
        assert torch.equal(mine.key_gain, layer_map.key_gain)
        assert mine.metrics == layer_map.metrics
    narrow = fit_sums(*arguments[:2], path, (1,), **{**common, "features": ("stream",)})
    alone = fit(*arguments, (1,), window_tokens=WINDOW, **{**common, "features": ("stream",)})
    for layer, layer_map in alone.splits[1].layers.items():
        torch.testing.assert_close(narrow.splits[1].layers[layer].weight, layer_map.weight, rtol=1e-4, atol=1e-5)


def test_what_the_sums_lack_is_said(tmp_path: Path) -> None:
    path = tmp_path / "sums.moments"
    summed(path=path, features=("stream",))
    for settings, words in (
        ({"splits": (2,)}, r"splits \[2\]: the sums are of splits \[1, 3\]"),
        ({"features": ("stream", "previous:1")}, r"features \['previous:1'\]: the sums are of \['stream'\]"),
        ({"ridge_lambda": "auto", "gains": "none"}, "needs held-out sums, and there are none"),
    ):
        with pytest.raises(FitError, match=words):
            fit_sums(model(), byte_tokenizer(), path, **settings)
    with pytest.raises(FitError, match=r"another pass \(model.anchors"):
        fit_sums(model(seed=1), byte_tokenizer(), path)


# --- merged and shared ------------------------------------------------------------------------------------------------


def test_merged_passes_are_one_pass_over_both(tmp_path: Path) -> None:
    paths = [tmp_path / f"{part}.moments" for part in range(2)]
    for part, path in enumerate(paths):
        summed(texts(10 * part, 10), path, held_out_sums=True)
    result = CliRunner().invoke(
        commands, ["moments", "merge", *map(str, paths), "-o", str(tmp_path / "c.moments"), "--json"]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["rows"], figures["texts"], figures["splits"]) == (18 * ROWS, 20, [1, 3])
    merged = Sample.load(tmp_path / "c.moments")
    # One pass that holds out the same windows: the second of each ten.
    both = texts(0, 20)
    held = [both[1], both[11]]
    fitted = summed([text for text in both if text not in held], held_out=0)
    for split in (1, 3):
        mine, other = merged.sums[split].centred(), fitted.sums[split].centred()
        assert mine.n == other.n == 18 * ROWS
        torch.testing.assert_close(mine.sxx, other.sxx, rtol=1e-5, atol=1e-5 * float(other.sxx.diagonal().max()))
        torch.testing.assert_close(mine.x_mean, other.x_mean, rtol=1e-6, atol=1e-6)
    tokens = [byte_tokenizer()(text)["input_ids"] for text in held]
    assert [window.ids for window in merged.held_out_windows] == tokens
    assert [entry["rows"] for entry in merged.texts] == [ROWS, 0, *[ROWS] * 9, 0, *[ROWS] * 8]
    maps = fit_sums(model(), byte_tokenizer(), tmp_path / "c.moments", **{**SOLUTION, "features": ("stream",)})
    assert maps.fit["rows"] == 18 * ROWS
    assert maps.fit["held_out_rows"] == 2 * ROWS


def test_passes_that_must_not_meet_are_refused(tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{name}.moments" for name in "abc")
    summed(texts(0, 10), a)
    summed(texts(9, 10), b)
    summed(texts(20, 10), c, head=3)
    with pytest.raises(FitError, match=r"b.moments: its text text 0 is in a file before it"):
        merge_files([a, b])
    with pytest.raises(FitError, match=r"c.moments: holds the sums of another pass \(head: 3, here 4\)"):
        merge_files([a, c])
    summed(texts(30, 10), c.with_suffix(".limited"), max_tokens=500)  # only the texts are fewer
    assert merge_files([a, c.with_suffix(".limited")]).rows == 9 * ROWS + 4 * ROWS + 20 - HEAD


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("shared")
    model().save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")
    (root / "text").mkdir()
    for number, text in enumerate(texts()):
        (root / "text" / f"{number:02}.txt").write_text(text)
    before = torch.get_num_threads()
    yield root
    torch.set_num_threads(before)


def test_two_processes_give_the_map_of_one(folder: Path) -> None:
    """Under torchrun, by gloo: each process runs its own windows, and maps of the sums agree to 1e-6."""
    command = [folder / "model", "--text", folder / "text", "--split", "1,3", "--window", WINDOW, "--threads", 1]
    command += ["--lambda", "auto", "--tokens", "all"]
    alone = CliRunner().invoke(commands, [str(part) for part in ["fit", *command, "--checkpoint", folder / "one"]])
    assert alone.exit_code == 0, alone.output
    assert "1,472 rows of 18 texts, splits 1,3, features stream + previous:1; ridgefill fit MODEL" in alone.stdout
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shared = [*torchrun, "-m", "ridgefill.cli.main", "fit", *command, "--checkpoint", folder / "two", "--json"]
    done = subprocess.run(
        [str(part) for part in shared], cwd=TESTS.parent, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 16 * ROWS
    parts = [Sample.load(f"{folder / 'two'}.{process}-of-2") for process in range(2)]
    assert [part.sums[3].n for part in parts] == [9 * ROWS, 7 * ROWS]
    assert [part.held_out_sums[3].n for part in parts if part.held_out_sums] == [0, 2 * ROWS]
    assert_same_sums(Sample.load(folder / "two"), Sample.load(folder / "one"), rtol=1e-12, atol=1e-9)
    maps = [
        fit_sums(model(), byte_tokenizer(), folder / name, **SOLUTION, dtype=torch.float32) for name in ("one", "two")
    ]
    for split in (1, 3):
        for layer, layer_map in maps[0].splits[split].layers.items():
            other = maps[1].splits[split].layers[layer]
            torch.testing.assert_close(other.weight, layer_map.weight, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(other.bias, layer_map.bias, rtol=1e-6, atol=1e-6)
    assert maps[0].fit == maps[1].fit
    with pytest.raises(FitError, match="holds the part of process 1 of 2"):
        fit_sums(model(), byte_tokenizer(), f"{folder / 'two'}.1-of-2")


def test_sums_meet_about_one_shift_whatever_each_began_with() -> None:
    """One process of a group of one: what `all_reduce` does to the sums beside adding those of others."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        generator = torch.Generator().manual_seed(0)
        moments, empty = Moments(5, 3), Moments(5, 3)
        moments.add(torch.randn(200, 5, generator=generator), torch.randn(200, 3, generator=generator))
        before = moments.tensors()
        expected = {name: tensor.clone() for name, tensor in before.items()}
        moments.all_reduce()
        empty.all_reduce()
        assert empty.n == 0
        for name, tensor in moments.tensors().items():
            assert torch.equal(tensor, expected[name]), name
    finally:
        dist.destroy_process_group()


# --- the command line -------------------------------------------------------------------------------------------------


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


def test_the_command_keeps_goes_on_and_solves_again(folder: Path, tmp_path: Path) -> None:
    sums, maps, again = tmp_path / "sums.moments", tmp_path / "maps.safetensors", tmp_path / "again.safetensors"
    reading = ("fit", folder / "model", "--text", folder / "text", "--split", "1,3", "--window", WINDOW, "--threads", 1)
    solving = ("--features", "stream", "--gains", "none")
    first = invoke(*reading, *solving, "--checkpoint", sums, "--checkpoint-every", 500, "-o", maps)
    assert first.exit_code == 0, first.output
    assert "goes on" not in first.stderr
    second = invoke(*reading, *solving, "--checkpoint", sums, "-o", again)
    assert second.exit_code == 0, second.output
    assert "sums.moments: the pass goes on from the sums there" in second.stderr
    assert again.read_bytes() == maps.read_bytes()
    third = invoke("fit", folder / "model", "--moments", sums, *solving, "-o", again, "--threads", 1)
    assert third.exit_code == 0, third.output
    assert again.read_bytes() == maps.read_bytes()
    other = invoke("fit", folder / "model", "--moments", sums, *solving, "--split", 3, "--lambda", "0.5", "-o", again)
    assert other.exit_code == 0, other.output
    held = json.loads(invoke("inspect", again, "--json").stdout)
    assert [(entry["split"], entry["lambda"]) for entry in held["splits"]] == [(3, 0.5)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--split", "1", "-o", "m"), "expected either --text (or --dataset), to read, or --moments"),
        (("--text", "t", "--moments", "s", "--split", "1", "-o", "m"), "expected either --text"),
        (("--text", "t", "-o", "m"), "expected --split"),
        (("--text", "t", "--split", "1"), "expected -o"),
        (("--moments", "s"), "expected -o"),
        (("--moments", "s", "-o", "m", "--window", "64"), "--window belongs to the pass over texts"),
        (("--moments", "s", "-o", "m", "--checkpoint", "c"), "--checkpoint belongs to the pass"),
        (("--moments", "s", "-o", "m", "--checkpoint-every", "5"), "--checkpoint-every belongs to the pass"),
    ],
)
def test_options_without_effect_are_refused(options: tuple[str, ...], words: str) -> None:
    result = invoke("fit", "model", *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


# --- the file ---------------------------------------------------------------------------------------------------------


def test_sums_survive_the_file_to_the_last_bit(tmp_path: Path) -> None:
    sample = summed(held_out_sums=True)
    sample.save(tmp_path / "a")
    loaded = Sample.load(tmp_path / "a")
    loaded.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert_same_sums(loaded, sample)
    assert loaded.settings == sample.settings
    assert loaded.finished
    # Any reader of safetensors opens it.
    from safetensors.numpy import load_file

    assert np.array_equal(load_file(tmp_path / "a")["fitted.3.xx"], sample.sums[3].tensors()["xx"].numpy())


def test_a_split_without_late_layers_is_kept_too(tmp_path: Path) -> None:
    last = NUM_LAYERS - 1
    sum_texts(model(), byte_tokenizer(), texts(), (last,), checkpoint=tmp_path / "sums", **PASS)
    maps = fit_sums(model(), byte_tokenizer(), tmp_path / "sums", gains="none", features=("stream",))
    assert maps.splits[last].layers == {}
    assert maps.fit["rows"] == 16 * ROWS


def test_a_list_of_texts_keeps_to_its_room() -> None:
    many = [{"name": f"text {number}", "sha256": f"{number:064x}", "rows": 3} for number in range(9000)]
    listed = listed_texts(many)
    assert len(json.dumps(listed)) < 600_000
    assert listed[: len(listed) - 1] == many[: len(listed) - 1]
    assert sum(entry["rows"] for entry in listed) == 27_000
    assert listed[-1]["name"].startswith(f"{9000 - len(listed) + 1} more texts")
