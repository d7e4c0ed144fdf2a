"""`marsjax demo --model smollm2`, on a model that comes with the package."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from marsjax import weights
from marsjax.data.problems import problem
from marsjax.demo import assets
from marsjax.instruct_demo import SOURCE, _summary, demo
from marsjax.models.adapters import attach, join, split
from marsjax.models.config import AdapterConfig
from marsjax.models.known import KNOWN
from marsjax.models.layout import from_params

BASE = str(assets() / "demo_ar")
QUESTIONS = tuple(problem(0, i, "test").question for i in range(2))


def adapter(path, *, gated):
    """A random adapter of the demo's model, saved."""
    model = attach(weights.load(BASE).model, AdapterConfig(rank=2, alpha=4.0, gated=gated, masks=3, sampler=True))
    own, made = split(nnx.to_pure_dict(nnx.state(model)))
    rng = np.random.default_rng(0)
    made = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), made)
    model = from_params(model.config, join(own, made), model.layout)
    trained = {"objective": "mtp", "block_size": 3}
    return weights.adapters.save_adapter(model, path, base=BASE, trained=trained)


def test_the_adapter_that_comes_along_fits_its_model():
    path = assets() / "smollm2_mtp"
    found = weights.adapters.open_adapter(path)
    weights.adapters.check(found, KNOWN[SOURCE])
    assert found.config.gated
    assert found.config.sampler
    assert found.training == {"block_size": 4, "objective": "mtp"}
    assert sum(file.stat().st_size for file in path.iterdir()) < 16e6


def test_same_text_and_a_report(tmp_path, capsys):
    path = adapter(tmp_path / "adapter", gated=True)
    report = demo(tmp_path / "out", source=BASE, adapter=path, questions=QUESTIONS, max_new_tokens=24)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["plan"], report["slots"]) == ("comb", 16)
    assert report["equal"] == 2
    assert "answers, all the same" in report["summary"]
    alone, several = report["alone"], report["with_adapter"]
    assert alone["tokens"] == several["tokens"] == alone["forwards"] >= several["forwards"]
    for row, question in zip(report["answers"], QUESTIONS, strict=True):
        assert row["question"] == question
        assert row["alone"]["ids"] == row["with_adapter"]["ids"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("class=answer") == 2
    assert "tokens a pass" in capsys.readouterr().out


def test_an_adapter_that_changes_answers_is_noticed(tmp_path):
    path = adapter(tmp_path / "adapter", gated=False)
    with pytest.raises(ValueError, match="is not gated: it changes the model's answers"):
        demo(tmp_path / "out", source=BASE, adapter=path, questions=QUESTIONS, max_new_tokens=24)
    rows = [{"alone": {"ids": [1, 2], "forwards": 2, "seconds": 1.0},
             "with_adapter": {"ids": [1, i], "forwards": 1, "seconds": 1.0}} for i in (2, 2, 3)]  # fmt: skip
    report = _summary(rows)
    assert report["equal"] == 2
    assert "6 tokens of 3 answers, 2 of 3 of them the same" in report["summary"]
