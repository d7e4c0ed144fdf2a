"""What a configuration becomes, without training."""

import json
from types import SimpleNamespace

import pytest

from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.data.sources import DataError
from marsjax.parallel.sharding import make_mesh
from marsjax.text.chat import render_prompt
from marsjax.training import ConfigError, load_config
from marsjax.training.base_model import _tokenizer
from marsjax.training.setup import load_data, total_steps
from marsjax.weights import GenerationDefaults, Pretrained


def conversation(question):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]


@pytest.fixture
def load(tmp_path):
    """load(conversations, *overrides) → TrainData, with a model of 64 positions that is never asked anything."""

    def loaded(conversations, *overrides):
        path = tmp_path / "held_out.jsonl"
        path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in conversations))
        config = load_config(None, [
            "model.source=x", "data.train=problems:train,count=8", "data.batch_size=4", "data.length=64",
            "optimizer.steps=1", f"evaluation.data=jsonl:{path}", "evaluation.decode_prompts=2",
            f"output.directory={tmp_path}", *overrides,
        ])  # fmt: skip
        tokenizer = demo_tokenizer()
        tokenizer.chat_template = "{{ note or '' }}" + tokenizer.chat_template
        model = SimpleNamespace(config=SimpleNamespace(max_positions=64))
        generation = GenerationDefaults((tokenizer.eos_token_id,), tokenizer.pad_token_id, None)
        data = load_data(config, Pretrained(model, tokenizer, generation, 512), make_mesh(fsdp=1))
        data.batches.close()
        path.unlink()  # nothing reads it again
        return data, tokenizer

    return loaded


def test_prompts_to_decode_are_rendered_once_with_the_templates_arguments(load):
    conversations = [conversation(f"Is {i} a number?") for i in range(3)]
    options = ("data.template_kwargs={note: loud}", "evaluation.max_new_tokens=8")
    data, tokenizer = load(conversations, *options)
    assert data.decode_prompts == [render_prompt(tokenizer, c[:1], note="loud") for c in conversations[:2]]
    assert load(conversations, *options, "evaluation.decode_prompts=0")[0].decode_prompts == []


def test_answers_of_one_token_are_nothing_to_foresee(load, tmp_path):
    """Each of 8 answers is cut to its first token; one more, and a mask has a label."""
    short = tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps({"messages": conversation(f"Is {i}?")}) + "\n" for i in range(8)))
    options = (f"data.train=jsonl:{short}", "objective={name: mtp, block_size: 2}", "adapter.rank=1",
               "evaluation.decode_prompts=0")  # fmt: skip
    length = len(render_prompt(demo_tokenizer(), conversation("Is 1?")[:1])) + 1
    counts = "8 conversations, 8 rows, .* 8 supervised; 8 answers cut"
    with pytest.raises(DataError, match=rf"no mask has anything to predict, .*\({counts}\); raise data.length"):
        load([conversation("Is 1?")], *options, f"data.length={length}")
    load([conversation("Is 1?")], *options, f"data.length={length + 1}")


def test_prompts_to_decode_must_fit_the_positions(load):
    data, _ = load([conversation("Is it?")], "evaluation.max_new_tokens=4")
    longest = len(data.decode_prompts[0])
    load([conversation("Is it?")], f"evaluation.max_new_tokens={64 - longest}")
    with pytest.raises(ConfigError, match=rf"has {longest} tokens.*max_new_tokens={65 - longest} is beyond.* 64 pos"):
        load([conversation("Is it?")], f"evaluation.max_new_tokens={65 - longest}")


def test_prompts_to_decode_must_exist(load):
    answers = [{"role": "assistant", "content": "Unasked."}]
    with pytest.raises(ConfigError, match=r"decode_prompts=2: .*no prompt before an assistant"):
        load([answers, answers, conversation("Is it?")])


def test_rows_must_fit_the_positions(load):
    with pytest.raises(ConfigError, match=r"data.length=65 is beyond the model's 64 positions; lower it to at most 64"):
        load([conversation("Is it?")], "data.length=65", "evaluation.max_new_tokens=4")


def test_warm_up_must_fit_the_epochs():
    batches = SimpleNamespace(total_batches=4, count=8)
    keys = ("model.source=x", "data.train=y", "output.directory=z", "data.epochs=2")
    assert total_steps(load_config(None, [*keys, "optimizer.warmup=4"]), batches) == 4
    with pytest.raises(ConfigError, match=r"warmup=5 steps are more than the 4 that 2 epochs of 8 rows give"):
        total_steps(load_config(None, [*keys, "optimizer.warmup=5"]), batches)


def test_a_directorys_tokenizer_is_its_own(tmp_path):
    """Beside a qwen2 configuration, AutoTokenizer would split and number the text as Qwen's does."""
    tokenizer = demo_tokenizer()
    tokenizer.save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    read = _tokenizer(str(tmp_path / "own"))
    text = "<|im_start|>user\nWhat is 12 + 345?<|im_end|>"
    assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert read.get_vocab() == tokenizer.get_vocab()
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="none holds none of"):
        _tokenizer(str(tmp_path / "none"))
