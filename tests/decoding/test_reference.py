"""The cached, fixed-shape step against plain Python without a cache, and MARS at its AR threshold against AR."""

import random
from collections import Counter

import decoding_reference as reference
import pytest
from decoding_helpers import END, MASK, PAD, ROWS, generator, pretrained

# Thresholds at which both models accept runs of every length: the random one is sure of nothing.
TAUS = {
    ("tiny_mars", "probability"): (0.99, 0.9, 0.7, 0.4),
    ("tiny_mars", "margin"): (0.9, 0.3),
    ("tiny_mars", "entropy"): (0.05, 0.5),
    ("tiny_random", "probability"): (0.0213, 0.0205, 0.0195),
    ("tiny_random", "margin"): (0.0008, 0.0003),
    ("tiny_random", "entropy"): (4.2368, 4.2375),
}


def batch_of(model, seed):
    draw = random.Random(seed)
    rows = []
    for i in range(ROWS):
        measure = ("probability", "probability", "margin", "entropy")[i % 4]
        if model == "tiny_mars" and i % 3:
            prompt = [50, draw.randrange(2, 12), draw.randrange(2, 12), draw.randrange(20, 24), 51]
        else:
            prompt = [draw.randrange(2, 64) for _ in range(draw.randrange(1, 24))]
        rows.append((prompt, draw.choice(TAUS[model, measure]), measure, draw.randrange(1, 33)))
    return rows


@pytest.mark.parametrize("model", ["tiny_mars", "tiny_random"])
def test_equals_decoding_without_a_cache(model):
    runs = Counter()
    for seed in range(2):
        rows = batch_of(model, seed)
        prompts, taus, measures, limits = map(list, zip(*rows, strict=True))
        results = generator(model).generate(prompts, tau=taus, measure=measures, max_new_tokens=limits)
        for (prompt, tau, measure, limit), result in zip(rows, results, strict=True):
            expected = reference.decode(
                pretrained(model).model, prompt, window=4, tau=tau, limit=limit, end=END, mask=MASK,
                forbidden=(MASK, PAD), measure=measure,
            )  # fmt: skip
            assert (result.ids, result.chunks) == expected, (prompt, tau, measure, limit)
            runs.update(result.chunks)
    assert all(runs[length] > 5 for length in (1, 2, 3, 4)), runs


@pytest.mark.parametrize("model", ["tiny_mars", "tiny_random"])
def test_the_strictest_threshold_is_ar(model):
    """Prompts of 1..2B tokens and limits of 1..2B+1, each under one of the three measures."""
    draw = random.Random(5)
    prompts = [[draw.randrange(2, 64) for _ in range(n)] for n in range(1, 9) for _ in range(9)]
    limits = [limit for _ in range(1, 9) for limit in range(1, 10)]
    measures = [("probability", "margin", "entropy")[i % 3] for i in range(len(prompts))]
    for i in range(0, len(prompts), ROWS):
        rows = slice(i, i + ROWS)
        options = {"max_new_tokens": limits[rows], "ignore_eos": i % 2 == 0}
        ar = generator(model, "ar").generate(prompts[rows], **options)
        mars = generator(model).generate(prompts[rows], measure=measures[rows], **options)
        assert [r.ids for r in mars] == [r.ids for r in ar]
        assert all(set(r.chunks) == {1} for r in (*mars, *ar))
        if options["ignore_eos"]:
            assert [len(r.ids) for r in ar] == limits[rows]


def test_ar_is_the_argmax_of_the_whole_sequence():
    model, prompt = pretrained("tiny_random").model, [7, 50, 3]
    expected = reference.decode(model, prompt, window=1, tau=1, limit=20, end=END, mask=MASK, forbidden=(MASK, PAD))[0]
    results = generator("tiny_random", "ar").generate([prompt] * ROWS, max_new_tokens=20)
    assert all(r.ids == expected for r in results)


def test_rows_of_a_mixed_batch_equal_their_solo_runs():
    draw = random.Random(1)
    rows = [
        {
            "tau": draw.choice([1.0, 0.9, 0.5, 0.2]),
            "max_new_tokens": draw.randrange(1, 33),
            "temperature": draw.choice([0.0, 0.7, 1.5]),
            "top_k": draw.choice([0, 5, 500]),
            "top_p": draw.choice([1.0, 0.8]),
            "seed": draw.randrange(2**32),
        }
        for _ in range(ROWS)
    ]
    prompts = [[draw.randrange(2, 64) for _ in range(draw.randrange(1, 24))] for _ in rows]
    together = generator().generate(prompts, **{name: [row[name] for row in rows] for name in rows[0]})
    for prompt, options, result in zip(prompts, rows, together, strict=True):
        alone = generator().generate(prompt, **options)
        assert (alone.ids, alone.chunks, alone.finish_reason) == (result.ids, result.chunks, result.finish_reason)


def test_the_cache_bucket_changes_nothing():
    prompts = [[50, 3, 4, 20, 51]] * ROWS
    small = generator().generate(prompts, tau=0.9, max_new_tokens=40)
    large = generator().generate(prompts, tau=0.9, max_new_tokens=[40] * (ROWS - 1) + [70])
    assert [(r.ids, r.chunks) for r in small] == [(r.ids, r.chunks) for r in large]
