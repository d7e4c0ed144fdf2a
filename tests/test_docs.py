"""What README and docs show is there: files, commands, flags, configuration keys, names, formats and figures."""

import functools
import importlib
import json
import re
import shlex
import typing
from pathlib import Path

import numpy as np
import pytest

from marsjax import cli
from marsjax.data.batch import BatchFormat, make_batch
from marsjax.data.rows import Row
from marsjax.data.sources import open_source, read_jsonl
from marsjax.training import TrainConfig, load_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = typing.get_type_hints(TrainConfig)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text()) if language in languages]


def inline(page: Path) -> list[str]:
    """What stands in backticks within the prose."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text()))]


def shell_lines(page: Path) -> list[str]:
    text = page.read_text()
    indented = re.findall(r"^ {4}(\S.*)$", FENCE.sub("", text), re.MULTILINE)
    return "\n".join([*blocks(page, "sh", "bash", "console"), *indented]).splitlines()


def commands(page: Path) -> list[list[str]]:
    """Argument lists of every `marsjax …` shown, without the program's name."""
    parts = [part for line in [*shell_lines(page), *inline(page)] for part in line.split("&&")]
    found = []
    for part in parts:
        if match := re.match(r"\s*(?:\S*/)?marsjax(?: (.*))?$", part):
            found.append(shlex.split(match[1] or "", comments=True))
    return [words for words in found if words]


@every_page
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"https?://", target):
            path, _, anchor = target.partition("#")
            assert (page.parent / path).exists(), f"{page.name} links to {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", (page.parent / path).read_text(), re.MULTILINE)
                assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]


@every_page
def test_python_compiles(page):
    for code in blocks(page, "python"):
        compile(code, page.name, "exec")


@every_page
def test_commands_are_understood(page, monkeypatch):
    """Every command goes through the real parser; what it would run is replaced by a record of its arguments."""
    called = []

    def record(name, function):
        @functools.wraps(function)
        def instead(*args, **kwargs):
            called.append((name, args, kwargs))
            return 0

        return instead

    monkeypatch.setattr(cli, "COMMANDS", {name: record(name, run) for name, run in cli.COMMANDS.items()})
    monkeypatch.chdir(ROOT)
    for words in commands(page):
        if len(words) == 1:  # a command mentioned by its name
            assert words[0] in cli.COMMANDS, f"{page.name}: marsjax {words[0]}"
            continue
        try:
            cli.main(words)
        except SystemExit:
            pytest.fail(f"{page.name}: marsjax {shlex.join(words)} is not understood")
        if words[0] == "train":
            _, args, kwargs = called[-1]
            load_config(*args, *kwargs.values())


@every_page
def test_configuration_keys_exist(page):
    text = " ".join([*inline(page), *shell_lines(page)])
    for section, key in re.findall(rf"(?<![\w./-])({'|'.join(SECTIONS)})\.([a-z]\w*)(?![\w/])", text):
        if key not in ("safetensors", "gguf", "jsonl"):  # file names
            assert key in typing.get_type_hints(SECTIONS[section]), f"{page.name}: {section}.{key}"


@every_page
def test_names_can_be_imported(page):
    for name in {match for code in inline(page) for match in re.findall(r"\bmarsjax(?:\.\w+)+", code)}:
        parts = name.split(".")
        for size in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:size]))
            except ImportError:
                continue
            functools.reduce(getattr, parts[size:], found)
            break


def test_the_table_of_sections_is_that_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/training.md").read_text(), re.MULTILINE)
    assert [section for section, _ in rows] == list(SECTIONS)
    for section, text in rows:
        keys = typing.get_type_hints(SECTIONS[section])
        values = {value for hint in keys.values() for value in typing.get_args(hint)}
        for name in re.findall(r"`(\w+)`", text):
            assert name in keys or name in values, f"{section}.{name}"


def test_the_data_formats_are_read(tmp_path):
    (lines,) = blocks(ROOT / "docs/training.md", "json")
    path = tmp_path / "shown.jsonl"
    path.write_text(lines)
    conversations = read_jsonl(path)
    assert len(conversations) == len(lines.splitlines())
    assert {messages[-1]["role"] for messages in conversations} == {"assistant"}
    assert conversations[-1][0] == {"role": "system", "content": json.loads(lines.splitlines()[-1])["system"]}
    for spec in re.findall(r"`(problems:\w+)`", (ROOT / "docs/training.md").read_text()):
        assert len(open_source(spec + ",seed=1,count=3")) == 3


def test_the_offset_table_is_what_batches_hold():
    """Prompt of 6 tokens, B = 4: the rows of the table of docs/training.md against a batch."""
    found = re.findall(r"^\| (noisy row t|block|last real.*?|predicts token|offset) \|(.*)\|$",
                       (ROOT / "docs/training.md").read_text(), re.MULTILINE)  # fmt: skip
    table = [[int(cell) for cell in cells.split("|")] for _, cells in found]
    assert len(table) == 5
    row, block, last_real, predicted, offset = map(np.array, table)
    supervised = np.arange(14) >= 6
    document = Row(np.arange(100, 114, dtype=np.int32), supervised, True)
    batch = make_batch([document], BatchFormat(batch_size=1, length=16, block_size=4, mask_id=1, end_id=2))
    assert row.tolist() == np.flatnonzero(batch.weights[0]).tolist()
    np.testing.assert_array_equal(block, row // 4)
    np.testing.assert_array_equal(batch.targets[0, row], 100 + predicted)
    np.testing.assert_array_equal(batch.offsets[0, row], offset)
    np.testing.assert_array_equal(predicted - offset, last_real)


def test_the_error_shown_is_the_error_raised():
    from marsjax.decoding.requests import check_options

    none = dict.fromkeys(("top_k", "top_p", "seed"))
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (compared below, with the page)
        check_options(1, tau=1.5, measure="probability", max_new_tokens=1, temperature=0.0, **none)
    assert str(raised.value) in inline(ROOT / "docs/decoding.md")


def test_the_sources_shown_are_known(tmp_path):
    page = ROOT / "docs/data.md"
    for spec in re.findall(r"^\| `(\w+:[^`]*)` \|", page.read_text(), re.MULTILINE):
        with pytest.raises((ValueError, ImportError)) as raised:
            open_source(spec)
        assert "unknown data source" not in str(raised.value), spec
    (line,) = blocks(page, "text")
    path = tmp_path / "shown.jsonl"
    path.write_text(line)
    assert [m["role"] for m in read_jsonl(path)[0]] == ["user", "assistant"]
    (mixture,) = blocks(page, "yaml")
    path = tmp_path / "shown.yaml"
    path.write_text(mixture)
    config = load_config(path, ["model.source=x", "output.directory=y", "optimizer.steps=3"])
    assert set(config.data.train.values()) == {0.7, 0.3}
