"""Texts from files, JSON lines and datasets are what they hold, conversations what the template makes; copies go."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from tiny import tiny_model
from tiny_tokenizer import byte_tokenizer, random_text

from ridgefill.capture import text_windows
from ridgefill.cli.main import commands
from ridgefill.errors import RidgeFillError
from ridgefill.texts import SHARED_WORDS, ChatFormat, Contamination, dataset_texts, find_texts

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TALK = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(texts: list[Any]) -> dict[str, str]:
    return {name: "".join(text) for name, text in texts}


def with_template(template: str = TEMPLATE, *, bos: bool = False) -> ChatFormat:
    chat = ChatFormat()
    chat.tokenizer = byte_tokenizer(bos=bos)
    chat.tokenizer.chat_template = template
    return chat


# --- sources ---------------------------------------------------------------------------------------------------------


def test_each_line_is_a_text_read_in_its_turn(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("plain\r\n", newline="")
    path = write_lines(tmp_path / "data" / "b.jsonl", [{"text": "one\ntwo"}, {"text": "naïve 東京"}])
    path.write_text(path.read_text() + "\n  \n" + json.dumps({"text": "last", "other": 1}))  # no newline at the end
    skipped: list[Path] = []
    texts = find_texts([tmp_path / "data"], skipped=skipped)
    wanted = {"a.txt": "plain\r\n", "b.jsonl:1": "one\ntwo", "b.jsonl:2": "naïve 東京", "b.jsonl:5": "last"}
    assert read(texts) == wanted
    assert read(texts[::-1]) == wanted  # in any order, any number of times
    assert not skipped


def test_a_file_that_is_no_text_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    skipped: list[Path] = []
    ((_, text),) = find_texts([tmp_path], skipped=skipped)
    assert list(text) == list(text) == []
    assert skipped == [tmp_path / "a.bin"]


@pytest.mark.parametrize(
    ("lines", "field", "message"),
    [
        (
            ['{"body": "x", "id": 1}'],
            "text",
            r"a.jsonl:1: has no field 'text'; found body, id; name the text's with --fi",
        ),
        (['["x"]'], "text", r"a.jsonl:1: has no field 'text'; found no object but"),
        (["x"], "text", "a.jsonl:1: expected a JSON object, found b'x"),
        (['{"text": "x"}', "{"], "text", "a.jsonl:2: expected a JSON object"),
        (['{"text": "x"}', '{"body": "x"}'], "text", "a.jsonl:2: has no field"),
        (['{"text": 5}'], "text", "a.jsonl:1: expected a text, or a list of messages with role and content, found '5'"),
        (['{"text": [{"from": "me"}]}'], "text", "expected a text, or a list of messages"),
    ],
)
def test_lines_without_a_text_are_refused_by_number(tmp_path: Path, lines: list[str], field: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(RidgeFillError, match=message):
        read(find_texts([path], skipped=[], field=field, chat=with_template()))


def test_a_conversation_goes_through_the_template(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": TALK}, {"messages": "a plain one"}])
    texts = find_texts([path], skipped=[], field="messages", chat=with_template())
    assert read(texts) == {"a.jsonl:1": "<user>Where?\n<assistant>Here.\n", "a.jsonl:2": "a plain one"}
    for template, message in (
        ("", "a.jsonl:1: is a conversation, and the model's tokenizer has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "a.jsonl:1: .* refuses it: roles must alternate"),
    ):
        with pytest.raises(RidgeFillError, match=message):
            read(find_texts([path], skipped=[], field="messages", chat=with_template(template)))


def test_a_window_of_a_conversation_has_one_bos(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": TALK}])
    for bos in (True, False):
        chat = with_template("{{ bos_token }}" + TEMPLATE, bos=bos)
        (window,) = text_windows(
            chat.tokenizer, find_texts([path], skipped=[], chat=chat), window_tokens=500, min_tokens=1, max_tokens=None
        )
        bos_id = chat.tokenizer.convert_tokens_to_ids("<bos>")
        assert window.ids[0] == bos_id
        assert window.ids.count(bos_id) == 1


class Rows:
    """What the package ``datasets`` would load."""

    column_names = ("text", "id")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"text": f"row {number}", "id": number}


def test_a_dataset_is_a_text_for_each_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def load_dataset(*arguments: Any, **settings: Any) -> Rows:
        asked.append((*arguments, settings["split"]))
        if arguments[0] == "nowhere":
            raise FileNotFoundError("no such dataset")
        return Rows()

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    wanted = {f"some/name[{number}]": f"row {number}" for number in range(3)}
    assert read(dataset_texts("some/name")) == wanted
    dataset_texts("some/name:plain")
    dataset_texts("some/name:plain:validation")
    dataset_texts("some/name::test")
    assert asked == [
        ("some/name", None, "train"),
        ("some/name", "plain", "train"),
        ("some/name", "plain", "validation"),
        ("some/name", None, "test"),
    ]
    with pytest.raises(
        RidgeFillError, match="dataset some/name: has no column 'body'; name one of text, id with --field"
    ):
        dataset_texts("some/name", field="body")
    (tmp_path / "local").mkdir()
    assert [name for name, _ in dataset_texts(str(tmp_path / "local"))] == ["local[0]", "local[1]", "local[2]"]
    with pytest.raises(RidgeFillError, match="dataset nowhere: no such dataset"):
        dataset_texts("nowhere")


def test_without_the_package_a_dataset_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = CliRunner().invoke(commands, ["fit", "model", "--dataset", "some/name", "--split", "1", "-o", "m"])
    assert result.exit_code == 1
    assert (
        "dataset some/name: the package 'datasets' is not installed: run pip install 'ridgefill[data]'" in result.stderr
    )


# --- contamination ---------------------------------------------------------------------------------------------------


def words(count: int, seed: int) -> list[str]:
    return [f"w{seed}x{number}" for number in range(count)]


def dropped(tmp_path: Path, text: str, evaluation: str = "") -> list[str]:
    (tmp_path / "evaluation.txt").write_text(evaluation or " ".join(words(200, 1)))
    contamination = Contamination([tmp_path / "evaluation.txt"])
    (named,) = contamination.without([("text", [text[:1000], text[1000:]])])
    assert "".join(named[1]) == ("" if contamination.dropped else text)
    return contamination.dropped


def test_fifty_words_in_a_row_are_found_wherever_they_are(tmp_path: Path) -> None:
    for start in (0, 77, 150):
        copied = words(200, 1)[start : start + SHARED_WORDS]
        for before, after in ((0, 0), (300, 3), (1, 400)):
            text = " ".join([*words(before, 2), *copied, *words(after, 3)])
            assert dropped(tmp_path, text) == ["text"]
            # One word less, or one other word in their midst, is no copy.
            assert dropped(tmp_path, text.replace(copied[0] + " ", "")) == []
            assert dropped(tmp_path, text.replace(copied[25] + " ", "other ")) == []


def test_case_lines_and_punctuation_hide_no_copy(tmp_path: Path) -> None:
    copied = words(200, 1)[40:100]
    assert dropped(tmp_path, "\n".join(word.upper() + ";" for word in copied)) == ["text"]


def test_strings_of_evaluation_records_count_whatever_their_field(tmp_path: Path) -> None:
    copied = words(SHARED_WORDS, 1)
    record = {"question": "Which?", "context": {"parts": ["short", "\n".join(copied)]}, "answer": 5}
    contamination = Contamination([write_lines(tmp_path / "a.jsonl", [{"x": "y"}, record])])
    texts = contamination.without([("clean", ["nothing of it"]), ("copy", [" ".join(copied)])])
    assert read(texts) == {"clean": "nothing of it", "copy": ""}
    assert contamination.dropped == ["copy"]


def test_an_evaluation_that_nothing_could_be_found_of_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text(" ".join(words(SHARED_WORDS - 1, 1)))
    with pytest.raises(RidgeFillError, match=r"short.txt: no file holds a text of 50 words"):
        Contamination([path])


def test_the_command_drops_and_counts_copies(tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=32).save_pretrained(tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    copied = " ".join(words(60, 1))
    records: list[Any] = [{"body": random_text(700, seed)} for seed in range(3)]
    records += [{"body": copied}, {"body": [{"role": "user", "content": random_text(300, 9)}]}]
    write_lines(tmp_path / "texts.jsonl", records)
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "set.txt").write_text("The question: " + copied)
    result = CliRunner().invoke(
        commands,
        [
            *(
                "fit",
                str(tmp_path / "model"),
                "--text",
                str(tmp_path / "texts.jsonl"),
                "--field",
                "body",
                "--split",
                "3",
            ),
            *("--exclude", str(tmp_path / "evaluation"), "-o", str(tmp_path / "maps"), "--window", "100", "--json"),
            *("--features", "stream", "--gains", "none", "--tokens", "all"),
        ],
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["dropped_texts"] == 1
    assert "dropped 1 texts that share 50 words with --exclude (the first: texts.jsonl:4)" in result.stderr
    assert [text["name"] for text in document["fit"]["texts"]] == [f"texts.jsonl:{line}" for line in (1, 2, 3, 5)]
