"""lm-eval's tasks on filled prompts: its own numbers without a fill, rows filled with one, and no zero in silence."""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.tasks
import nltk
import pytest
import torch
import wonderwords
from click.testing import CliRunner
from lm_eval.api.instance import Instance
from lm_eval.api.registry import model_registry
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tiny import VOCAB, random_maps, tiny_model
from tiny_tokenizer import byte_tokenizer, random_text

from ridgefill.cli.main import commands
from ridgefill.errors import AttachError, MapSchemaError, RidgeFillError
from ridgefill.evaluate.lm_eval import UNFILLED, RidgeFillLM

ROOT = Path(__file__).parent.parent
LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent
HEAD, TAIL, MIN_BULK = 4, 48, 32
RULER, LONGBENCH = "niah_single_1", "longbench2_local"
DOCUMENTS = 3

# A task of lm-eval's, but for where its documents are: its templates, choices and metric are its own.
LOCAL_TASK = """
include: {common}
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    train: {documents}
  cache_dir: {cache}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, random maps for it, and a LongBench v2 task with documents of its own."""
    root = tmp_path_factory.mktemp("lm_eval")
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    random_maps(model).save(root / "maps.safetensors")
    documents = [
        {
            "context": random_text(700 + 40 * number, number),
            "question": f"Which is the letter after {'ABC'[number]}? ",
            "choices": list("BCDE"),
            "answer": "ABC"[number],
        }
        for number in range(DOCUMENTS)
    ]
    (root / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (root / "tasks").mkdir()
    (root / "tasks" / "local.yaml").write_text(
        LOCAL_TASK.format(
            common=LM_EVAL_TASKS / "longbench2" / "_longbench_common_yaml",
            task=LONGBENCH,
            documents=root / "documents.jsonl",
            cache=root / "cache",
        )
    )
    return root


@pytest.fixture(scope="module", autouse=True)
def _ruler_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What RULER reads when it is imported.

    nltk's sentence splitter is asked for and splits nothing in a repeated haystack: a folder does. Needles are named by
    an adjective and a noun; a few of the package's are enough, and all ten million pairs take 20 s to sort.
    """
    data = tmp_path_factory.mktemp("nltk_data")
    (data / "tokenizers" / "punkt_tab").mkdir(parents=True)
    words = wonderwords.RandomWord()
    words._categories = {kind: of_kind[:40] for kind, of_kind in words._categories.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "path", [str(data)])
        patch.setattr(wonderwords, "RandomWord", lambda: words)
        # It asks pip, git and the compiler about this machine: seconds in every run.
        patch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
        yield


def model(folder: Path, **arguments: Any) -> RidgeFillLM:
    settings = {"device": "cpu", "tail": TAIL, "min_bulk": MIN_BULK, **arguments}
    return RidgeFillLM(str(folder / "model"), maps=str(folder / "maps.safetensors"), **settings)


def stock(folder: Path, **arguments: Any) -> HFLM:
    return HFLM(str(folder / "model"), device="cpu", **arguments)


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 259) for _ in range(count)]


def scored(lm: Any, *requests: tuple[list[int], list[int]]) -> list[tuple[float, bool]]:
    return lm._loglikelihood_tokens([(None, *request) for request in requests], disable_tqdm=True)


def assert_equal_scores(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)


# --- scores --------------------------------------------------------------------------------------------------------


def test_scores_without_a_fill_are_lm_eval_s_own(folder: Path) -> None:
    # Without its cache of contexts: 0.4.13 scores the third request right in it, and the first two at the wrong row.
    own, ours = stock(folder, batch_size=3, logits_cache=False), model(folder, tier="exact", batch_size=3)
    context = tokens(150, 1)
    with torch.no_grad():
        likelihoods = own.model(torch.tensor([context])).logits[0, -1].log_softmax(-1)
    likely = int(likelihoods.argmax())
    requests = [
        (context, [likely]),
        (context, [(likely + 1) % VOCAB]),  # reads the same rows
        (context[:-2], [*context[-2:], likely]),  # and so does this
        (tokens(144, 2), tokens(5, 3)),
        (tokens(120, 4), tokens(2, 5)),
        (tokens(5, 6), tokens(3, 7)),
        (tokens(1, 8), tokens(1, 9)),
    ]
    found = scored(ours, *requests)
    assert_equal_scores(found, scored(own, *requests))
    assert found[0] == (pytest.approx(float(likelihoods[likely]), abs=1e-4), True)
    assert not found[1][1]
    assert ours._tally.prompts == 5
    assert ours._tally.rows_filled == 0


def test_a_prompt_longer_than_the_model_loses_its_beginning_as_in_lm_eval(folder: Path) -> None:
    request = tokens(90, 1), tokens(4, 2)
    ours = model(folder, tier="exact", max_length=60)
    assert_equal_scores(scored(ours, request), scored(stock(folder, max_length=60), request))
    assert ours._tally.rows == 60
    for wrong in (([], [5]), ([5], []), ([5], tokens(61, 3))):
        with pytest.raises(RidgeFillError, match="expected at least one of each"):
            scored(ours, wrong)


@pytest.mark.parametrize("tier", ["exact", "plumb"])
def test_a_batch_of_unequal_prompts_scores_as_they_do_alone(folder: Path, tier: str) -> None:
    requests = [(tokens(150 - 9 * number, number), tokens(1 + number, 9)) for number in range(3)]
    alone, together = (model(folder, tier=tier, batch_size=size) for size in (1, 3))
    assert_equal_scores(scored(together, *requests), scored(alone, *requests))
    calls = {"exact": (0, 0), "plumb": (3, 1)}[tier]
    assert (alone.attachment.counters["filled"], together.attachment.counters["filled"]) == calls
    assert together._tally.rows == sum(len(context) + len(continuation) - 1 for context, continuation in requests)


def test_filled_prompts_of_one_batch_score_as_alone_with_the_pads_in_their_heads(folder: Path) -> None:
    long, short = (tokens(150, 1), tokens(3, 2)), (tokens(140, 3), tokens(1, 4))
    pads = 12
    together = model(folder, batch_size=2)
    found = scored(together, long, short)
    assert together._tally.rows_filled == 2 * (152 - TAIL - HEAD - pads)
    # The head's end is the same column in both: the longer prompt has as many more rows before it.
    alone = [scored(model(folder, head=HEAD + pads), long)[0], scored(model(folder), short)[0]]
    assert_equal_scores(found, alone)
    assert abs(found[0][0] - scored(stock(folder), long)[0][0]) > 1e-2


def test_the_tail_is_as_long_as_the_continuation(folder: Path) -> None:
    lm = model(folder)
    scored(lm, (tokens(200, 1), tokens(70, 2)))
    assert lm.attachment.status()["spans"] == {"head": [0, HEAD], "fill": [HEAD, 199], "tail": [199, 269]}
    assert lm._tally.rows_filled == 195


def test_the_batch_size_can_be_found_by_lm_eval(folder: Path) -> None:
    requests = [(tokens(150, number), tokens(2, 9)) for number in range(3)]
    found = model(folder, batch_size="auto", max_batch_size=2)
    assert_equal_scores(scored(found, *requests), scored(model(folder), *requests))
    assert found.attachment.counters["filled"] == 2


# --- whole tasks ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """RULER's first needle task and LongBench v2 by name of a run, as lm-eval returns and as it saves them."""
    if "ridgefill" not in model_registry:
        model_registry.register("ridgefill", target=RidgeFillLM)
    root, found = tmp_path_factory.mktemp("runs"), {}
    manager = TaskManager(
        include_path=[LM_EVAL_TASKS / "ruler", folder / "tasks"],
        include_defaults=False,
        metadata={"pretrained": str(folder / "model"), "max_seq_lengths": [1024]},
    )
    ours = {"maps": str(folder / "maps.safetensors"), "tail": TAIL, "min_bulk": MIN_BULK}
    for name, arguments in {
        "hf": {},
        "exact": {"tier": "exact", **ours},
        "speed": {"tier": "speed", **ours},
        "identity": {"tier": "speed", "identity": True, **ours},
    }.items():
        tracker = EvaluationTracker(output_path=str(root / name))
        results = lm_eval.simple_evaluate(
            model="ridgefill" if arguments else "hf",
            model_args={"pretrained": str(folder / "model"), **arguments},
            tasks=[RULER, LONGBENCH],
            limit=2,
            device="cpu",
            gen_kwargs={"max_gen_toks": 8},
            bootstrap_iters=0,
            task_manager=manager,
            evaluation_tracker=tracker,
        )
        found[name] = {"samples": {}, "report": results["config"].get("ridgefill"), "results": results["results"]}
        samples = results.pop("samples")
        for task, of_task in samples.items():
            answers = [[answer for (answer,) in sample["resps"]] for sample in of_task]
            found[name]["samples"][task] = answers
        tracker.save_results_aggregated(results=results, samples=samples)
        for task in results["configs"]:
            tracker.save_results_samples(task_name=task, samples=samples[task])
    return root, found


def test_tasks_without_a_fill_answer_as_lm_eval_s_own_model(runs: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    _, found = runs
    hf, exact = found["hf"], found["exact"]
    assert hf["samples"][RULER] == exact["samples"][RULER]
    for expected, answered in zip(hf["samples"][LONGBENCH], exact["samples"][LONGBENCH], strict=True):
        assert len(answered) == 4
        assert_equal_scores(answered, expected)
    assert hf["results"] == exact["results"]
    assert hf["report"] is None
    assert exact["report"]["tier"] == "exact"
    assert exact["report"]["tasks"][RULER]["rows_filled"] == 0
    assert exact["report"]["tasks"][LONGBENCH]["calls"] == {"the tier is exact": 2}  # the choices share a prompt


def test_tasks_with_a_fill_say_how_many_rows_it_filled(runs: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    _, found = runs
    for name in ("speed", "identity"):
        report = found[name]["report"]
        assert (report["tier"], report["identity"]) == ("speed", name == "identity")
        for task in (RULER, LONGBENCH):
            tally = report["tasks"][task]
            assert tally["prompts"] == 2
            assert tally["calls"]["filled"] == 2
            assert tally["rows_filled"] == tally["rows"] - 2 * (HEAD + TAIL) > 1000
    # RULER's prompts are generated from: at most seven decode steps after each prefill.
    assert 0 < found["speed"]["report"]["tasks"][RULER]["calls"]["decode"] <= 14

    def scores(name: str) -> list[float]:
        return [score for answers in found[name]["samples"][LONGBENCH] for score, _ in answers]

    for one, other in (("speed", "exact"), ("identity", "exact"), ("speed", "identity")):
        differences = [abs(a - b) for a, b in zip(scores(one), scores(other), strict=True)]
        assert min(differences) > 1e-3, (one, other)
    assert found["speed"]["samples"][RULER] != found["exact"]["samples"][RULER]


def test_saved_runs_can_be_compared(
    runs: tuple[Path, dict[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root, _ = runs
    script = _pairs_script(monkeypatch)
    stock_run, exact, speed = (script.read_run(root / name) for name in ("hf", "exact", "speed"))
    assert (stock_run.tier, exact.tier, speed.tier) == ("hf", "exact", "speed")
    rows = {(row["task"], row["metric"]): row for row in script.compare(stock_run, exact)}
    assert set(rows) == {(RULER, "1024"), (LONGBENCH, "acc")}  # RULER's other lengths were not measured
    for row in rows.values():
        assert (row["documents"], row["change"].low, row["change"].high) == (2, 0.0, 0.0)
        assert row["rows_filled"] == 0
    assert all(row["rows_filled"] > 1000 for row in script.compare(stock_run, speed))
    result = CliRunner().invoke(script.main, [str(root / name) for name in ("hf", "speed", "identity")])
    assert result.exit_code == 0, result.output
    assert "speed (speed) beside hf (hf)" in result.stdout
    assert "identity (identity) beside hf (hf)" in result.stdout


# --- zero rows ----------------------------------------------------------------------------------------------------


def _instance(kind: str, task: str, *arguments: Any) -> Instance:
    return Instance(kind, {}, arguments, 0, (task, 0, 1))


def test_a_task_that_fills_nothing_is_an_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    UNFILLED.clear()
    lm, own = model(folder), stock(folder)
    text = random_text(200)
    requests = [_instance("loglikelihood_rolling", "whole texts", text)]
    # Every row's logits are asked for: nothing may be filled, and the sums are lm-eval's.
    whole = lm.loglikelihood_rolling(requests, disable_tqdm=True)
    assert whole == pytest.approx(own.loglikelihood_rolling(requests, disable_tqdm=True), rel=1e-5)
    mixed = [
        _instance("loglikelihood", "short", "a b", " c"),
        _instance("loglikelihood", "long", text, " c"),
        _instance("loglikelihood", "short", "a", " b"),
    ]
    scores = lm.loglikelihood(mixed, disable_tqdm=True)
    assert_equal_scores([scores[0], scores[2]], own.loglikelihood([mixed[0], mixed[2]], disable_tqdm=True))
    report = lm.get_model_info()["ridgefill"]
    assert [message.split(":")[0] for message in UNFILLED] == ["whole texts", "short"]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == UNFILLED
    assert "filled none of 200 rows" in UNFILLED[0]
    assert "1 x # rows are fewer than tail=# and min_bulk=#" in UNFILLED[0]
    assert {task: bool(tally["rows_filled"]) for task, tally in report["tasks"].items()} == {
        "whole texts": False,
        "short": False,
        "long": True,
    }
    json.dumps(report)
    UNFILLED.clear()
    assert not model(folder, tier="exact").unfilled()


def test_generation_is_counted_by_task_and_by_prompt(folder: Path) -> None:
    lm = model(folder, batch_size=2)
    settings = {"until": [], "max_gen_toks": 3, "do_sample": False}
    texts = [random_text(150, 1), random_text(146, 2), "a b"]
    requests = [_instance("generate_until", task, text, settings) for task, text in zip("aab", texts, strict=True)]
    own = model(folder, tier="exact")
    assert len(lm.generate_until(requests, disable_tqdm=True)) == len(own.generate_until(requests, disable_tqdm=True))
    assert (lm.tallies["a"].prompts, lm.tallies["a"].rows, lm.tallies["a"].calls["filled"]) == (2, 296, 1)
    assert lm.tallies["a"].rows_filled == 2 * (150 - TAIL - HEAD - 4)  # the pads lengthen the head
    assert (lm.tallies["b"].prompts, lm.tallies["b"].rows_filled) == (1, 0)
    assert lm.unfilled()[0].startswith("b: tier 'speed' filled none of 3 rows")


# --- what it is made with -----------------------------------------------------------------------------------------


def test_arguments_reach_attach_and_wrong_ones_are_refused(folder: Path) -> None:
    lm = model(folder, tier="quality", share=0.25, head=6, guard="off")
    status = lm.attachment.status()
    assert (status["tier"], status["head"], status["tail"], status["min_bulk"]) == ("quality", 6, TAIL, MIN_BULK)
    scored(lm, (tokens(150, 1), [5]))
    bulk = 150 - TAIL - 6
    assert lm._tally.rows_selected == round(0.25 * bulk)
    assert lm._tally.rows_filled == bulk - lm._tally.rows_selected
    gated = model(folder, tier="quality", gates={"3": 0.5})  # JSON knows strings alone
    scored(gated, (tokens(150, 1), [5]))
    assert gated.attachment.status()["gates"] == {3: round(0.5 * (150 - TAIL - HEAD))}
    with pytest.raises(RidgeFillError, match="needs maps=FILE"):
        RidgeFillLM(str(folder / "model"), device="cpu")
    with pytest.raises(AttachError, match="unknown tier 'fast'"):
        model(folder, tier="fast")
    with pytest.raises(MapSchemaError, match="no maps for split 2"):
        model(folder, split=2)
    with pytest.raises(RidgeFillError, match="leave out --use_cache"):
        lm.set_cache_hook(None)  # what lm-eval's cache does first


def test_a_model_in_memory_and_maps_in_memory(folder: Path) -> None:
    tiny = tiny_model("llama")
    lm = RidgeFillLM(tiny, maps=random_maps(tiny), tokenizer=byte_tokenizer(), tail=TAIL, min_bulk=MIN_BULK)
    request = tokens(150, 1), tokens(3, 2)
    assert_equal_scores(scored(lm, request), scored(model(folder), request))
    assert lm.report()["maps"] is None


def test_lm_eval_finds_the_model_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["ridgefill"].partition(":")
    assert getattr(importlib.import_module(module), name) is RidgeFillLM


# --- the command --------------------------------------------------------------------------------------------------


def _command(folder: Path, output: Path, **arguments: Any) -> list[str]:
    given = {"pretrained": folder / "model", "maps": folder / "maps.safetensors", "tail": TAIL, **arguments}
    joined = ",".join(f"{name}={value}" for name, value in given.items())
    tasks = ["--tasks", LONGBENCH, "--include_path", str(folder / "tasks"), "--limit", "2", "--device", "cpu"]
    saved = ["--output_path", str(output), "--log_samples"]
    return ["lm-eval", "run", "--model", "ridgefill", "--model_args", joined, *tasks, *saved]


def _saved_tally(output: Path) -> dict[str, Any]:
    (results,) = output.rglob("results_*.json")
    config = json.loads(results.read_text())["config"]
    assert config["model"] == "ridgefill"
    assert list(output.rglob(f"samples_{LONGBENCH}_*.jsonl"))
    tally: dict[str, Any] = config["ridgefill"]["tasks"][LONGBENCH]
    return tally


def test_the_command_runs_a_task_through_lm_eval_s_own_command_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.utils

    # This process keeps its logging and its environment; and reading the 14,000 files of lm-eval's tasks takes 13 s.
    monkeypatch.setattr(lm_eval.utils, "_LOGGING_CONFIGURED", True)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    result = CliRunner().invoke(commands, _command(folder, tmp_path / "filled", min_bulk=MIN_BULK))
    assert result.exit_code == 0, result.output
    assert f"|{LONGBENCH}|" in result.stdout
    assert _saved_tally(tmp_path / "filled")["rows_filled"] > 1000
    result = CliRunner().invoke(commands, _command(folder, tmp_path / "not", min_bulk=4000))
    assert result.exit_code == 1
    assert f"error: {LONGBENCH}: tier 'speed' filled none of" in result.stderr
    assert _saved_tally(tmp_path / "not")["rows_filled"] == 0  # written all the same


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ridgefill.cli.main", *_command(folder, tmp_path, min_bulk=MIN_BULK)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    assert _saved_tally(tmp_path)["rows_filled"] > 1000


def _fake_command_line(monkeypatch: pytest.MonkeyPatch, unfilled: list[str]) -> list[list[str]]:
    from lm_eval import __main__ as command_line

    seen: list[list[str]] = []

    def run() -> None:
        seen.append(list(sys.argv))
        UNFILLED.extend(unfilled)

    monkeypatch.setattr(command_line, "cli_evaluate", run)
    return seen


@pytest.mark.parametrize("unfilled", [[], ["some task: tier 'speed' filled none of 12 rows"]])
def test_the_command_hands_its_arguments_on_and_fails_where_nothing_was_filled(
    monkeypatch: pytest.MonkeyPatch, unfilled: list[str]
) -> None:
    UNFILLED.append("of an earlier run")
    seen, before = _fake_command_line(monkeypatch, unfilled), sys.argv
    arguments = ["--model", "ridgefill", "-a", "maps=m,tier=speed", "--tasks", "x", "--limit", "2", "-s"]
    result = CliRunner().invoke(commands, ["lm-eval", *arguments])
    assert seen == [["lm-eval", *arguments]]
    assert sys.argv is before
    assert model_registry.get("ridgefill") is RidgeFillLM
    assert result.exit_code == len(unfilled), result.output
    assert result.stderr == "".join(f"error: {message}\n" for message in unfilled)
    UNFILLED.clear()


def test_without_lm_eval_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.__main__", raising=False)
    result = CliRunner().invoke(commands, ["lm-eval", "ls", "tasks"])
    assert result.exit_code == 1
    assert result.stderr == "error: the package 'lm_eval' is not installed: run pip install 'ridgefill[lm-eval]'\n"


# --- pairs by hand ------------------------------------------------------------------------------------------------


def _pairs_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    return importlib.import_module("lm_eval_pairs")


def _saved(root: Path, values: list[float], *, date: str = "2026-11-30T10-00-00.5", **changes: Any) -> Path:
    """A run as lm-eval saves it: one task, one metric, these values."""
    place = root / "some__model"
    place.mkdir(parents=True, exist_ok=True)
    tally = {"tasks": {"t": {"rows_filled": changes.get("rows_filled", 90)}}}
    config = {"model": "ridgefill", "ridgefill": {"tier": changes.get("tier", "speed"), "identity": False, **tally}}
    (place / f"results_{date}.json").write_text(json.dumps({"config": config}))
    lines = [
        {
            "doc_id": number,
            "filter": "none",
            "doc_hash": str(number),
            "prompt_hash": changes.get("prompt", "p"),
            "doc": "one\u2028two",
            "metrics": ["acc", "4096", "words"],
            "acc": value,
            "4096": -1,
            "words": [1, 2],
        }
        for number, value in enumerate(values)
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (place / f"samples_t_{date}.jsonl").write_text(text, encoding="utf-8")
    return root


def test_pairs_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _pairs_script(monkeypatch)
    first = _saved(tmp_path / "a", [1.0] * 16 + [0.0] * 4, tier="exact", rows_filled=0)
    second = _saved(tmp_path / "b", [0.0] * 20, date="2026-11-29T10-00-00.5")  # not the newest
    _saved(tmp_path / "b", [0.0] * 8 + [1.0] * 10 + [0.0] * 2)
    (row,) = script.compare(script.read_run(first), script.read_run(second))
    assert (row["task"], row["metric"], row["documents"], row["rows_filled"]) == ("t", "acc", 20, 90)
    assert (row["stock"], row["other"]) == (0.8, 0.5)
    assert row["change"].estimate == pytest.approx(-0.3)
    assert row["change"].low < -0.3 < row["change"].high
    assert (row["test"].lost, row["test"].gained) == (8, 2)
    assert row["test"].p == pytest.approx(2 * sum((1, 10, 45)) / 1024)
    fractions = script.read_run(_saved(tmp_path / "c", [0.5] * 20))
    (row,) = script.compare(script.read_run(first), fractions)
    assert row["test"] is None


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _pairs_script(monkeypatch)
    first = script.read_run(_saved(tmp_path / "a", [1.0] * 4))
    with pytest.raises(RidgeFillError, match="tier 'speed' filled no row of t"):
        script.read_run(_saved(tmp_path / "zero", [1.0] * 4, rows_filled=0))
    for other, message in (
        (_saved(tmp_path / "prompts", [1.0] * 4, prompt="q"), "the prompts differ"),
        (_saved(tmp_path / "fewer", [1.0] * 3), "4 and 3 samples of different documents"),
    ):
        with pytest.raises(RidgeFillError, match=message):
            script.compare(first, script.read_run(other))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RidgeFillError, match="no results_"):
        script.read_run(tmp_path / "empty")
    for samples in (tmp_path / "a").rglob("samples_*"):
        samples.unlink()
    with pytest.raises(RidgeFillError, match="--log_samples"):
        script.read_run(tmp_path / "a")
    result = CliRunner().invoke(script.main, [str(tmp_path / "zero"), str(tmp_path / "fewer")])
    assert result.exit_code == 1
    assert "filled no row" in result.stderr
