import io
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from marsjax import cli, weights
from marsjax.parallel.sharding import make_mesh
from marsjax.training.base_model import new_model
from marsjax.training.config import ModelSection

INIT = {"family": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 16, "max_positions": 256}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with tokenizer and mask token."""
    section = ModelSection(init=INIT, tokenizer="demo")
    path = tmp_path_factory.mktemp("model") / "export"
    return str(weights.save(new_model(section, make_mesh(fsdp=1), with_mask_token=True), path))


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", [(), *((name,) for name in cli.COMMANDS)], ids=str)
def test_help_says_what_a_command_does(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    names = cli.COMMANDS if not command else [command[0]]
    assert all(name in shown for name in names)
    assert len(shown) > 200


def test_importing_the_command_line_imports_no_jax():
    check = "import sys, marsjax.cli; sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_generate_prints_json_a_prompt(capsys, model):
    code, out, _ = run(
        capsys, "generate", "--model", model, "--prompt", "Add 1 and 2.", "Count.", "--tau", "0.5", "--max-new-tokens",
        "7", "--ignore-eos", "--json",
    )  # fmt: skip
    assert code == 0
    answers = [json.loads(line) for line in out.splitlines()]
    assert [a["prompt"] for a in answers] == ["Add 1 and 2.", "Count."]
    for answer in answers:
        assert len(answer["ids"]) == 7
        assert sum(answer["chunks"]) == 7
        assert answer["forwards"] == len(answer["chunks"])
        assert answer["tokens_per_forward"] == pytest.approx(7 / answer["forwards"])
        assert answer["finish_reason"] == "length"


def test_generate_streams_the_same_text_that_json_holds(capsys, model, monkeypatch):
    options = ("generate", "--model", model, "--max-new-tokens", "6", "--ignore-eos")
    _, out, _ = run(capsys, *options, "--prompt", "Hello", "--json")
    text = json.loads(out)["text"]
    code, streamed, _ = run(capsys, *options, "--prompt", "Hello")
    assert (code, streamed) == (0, text + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert run(capsys, *options, "--prompt", "-")[1] == streamed


def test_show_chunks_counts(capsys, model):
    code, out, _ = run(
        capsys, "generate", "--model", model, "--prompt", "Hi", "--tau", "1", "--max-new-tokens", "5", "--show-chunks",
        "--ignore-eos",
    )  # fmt: skip
    assert code == 0
    assert "5 tokens in 5 forward passes: 1.00 a pass; ended by length" in out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("generate", "--model", "nowhere", "--prompt", "a", "--tau", "1.5"), "tau=1.5 is out of range"),
        (("generate", "--model", "./nowhere", "--prompt", "a"), "'./nowhere' does not exist"),
        (("train", "nowhere.yaml"), "no such configuration file"),
        (("convert", "./nowhere", "out"), "'./nowhere' does not exist"),
    ],
)
def test_errors_are_one_message_and_exit_code_1(capsys, argv, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *argv)
    assert code == 1
    assert told in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_unknown_options_are_refused_by_name(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "--model", "m", "--prompt", "a", "--thresold", "0.5"])
    assert ended.value.code == 2
    assert "--thresold" in capsys.readouterr().err


def test_convert_changes_the_dtype_and_nothing_else(capsys, model, tmp_path):
    target = tmp_path / "half"
    code, out, _ = run(capsys, "convert", model, str(target), "--dtype", "bfloat16")
    assert (code, out.strip()) == (0, str(target))
    before, after = weights.load(model), weights.load(target)
    assert after.mask_id == before.mask_id
    one, other = (p.model.embed_table.embedding[...] for p in (before, after))
    np.testing.assert_array_equal(other, one.astype(jnp.bfloat16).astype(jnp.float32))


def test_train_then_generate(capsys, tmp_path):
    """The whole way on the smallest scale: from a configuration file to an answer of the exported model."""
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"model: {{init: {json.dumps(INIT)}, tokenizer: demo}}\n"
        "data: {train: 'problems:train', length: 128, batch_size: 4}\n"
        "objective: {name: mars, block_size: 2}\n"
        "optimizer: {steps: 3, learning_rate: 1.0e-3}\n"
        "output: {tensorboard: false}\n"
    )
    code, out, _ = run(capsys, "train", str(config), f"output.directory={tmp_path / 'run'}")
    assert code == 0
    assert "3 steps" in out
    export = str(tmp_path / "run" / "export")
    code, out, _ = run(capsys, "generate", "--model", export, "--prompt", "Hi", "--max-new-tokens", "4", "--json")
    assert code == 0
    assert json.loads(out)["ids"]
