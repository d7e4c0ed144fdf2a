"""Exact questions to the step, with a network that is a table."""

import numpy as np
import pytest
from decoding_helpers import finish, script, script_batch

SURE = (0.99, 0.97, 0.50, 0.99, 0.99, 0.94, 0.99, 0.99)
TEXT = (3, 4, 5, 6, 7, 8, 9, 10)
SCRIPT = script(TEXT, SURE, prompt_length=3)


def test_runs_and_rate():
    [result] = finish(script_batch(SCRIPT, window=4, tau=0.95))
    assert result.ids == list(TEXT)
    assert result.chunks == [2, 3, 3]
    assert result.forwards == 3
    assert round(result.tokens_per_forward, 3) == 2.667
    assert (result.finish_reason, result.stop) == ("length", None)


def by_hand(limit, tau=0.95, window=4):
    done, chunks = 0, []
    while done < limit:
        run = 1
        while run < window and done + run < limit and SURE[min(done + run, 7)] >= tau:
            run += 1
        chunks.append(run)
        done += run
    return chunks


def test_exactly_as_many_tokens_as_asked():
    limits = [*range(1, 10), 1, 5, 9]
    results = finish(script_batch(SCRIPT, 4, rows=12, tau=0.95, max_new_tokens=limits))
    for limit, result in zip(limits, results, strict=True):
        assert len(result.ids) == limit
        assert result.chunks == by_hand(limit)


@pytest.mark.parametrize("steps", [1, 3, None])
def test_calls_of_any_number_of_steps_give_the_same(steps):
    assert finish(script_batch(SCRIPT, 4, tau=0.95), steps)[0].chunks == [2, 3, 3]


def test_every_listed_end_stops_with_the_end_in_the_ids():
    def run(**options):
        [result] = finish(script_batch(SCRIPT, 4, tau=0.95, **options))
        return result.ids, result.finish_reason, result.stop, result.chunks

    assert run(ends=(15, 7)) == ([3, 4, 5, 6, 7], "stop", 7, [2, 3])
    assert run(ends=(6, 7)) == ([3, 4, 5, 6], "stop", 6, [2, 2])
    assert run(ends=(15,), stop_ids=[5]) == ([3, 4, 5], "stop", 5, [2, 1])
    assert run(ends=(7,), ignore_eos=True) == (list(TEXT), "length", None, [2, 3, 3])
    assert run(ends=(7,), ignore_eos=True, stop_ids=[6]) == ([3, 4, 5, 6], "stop", 6, [2, 2])


def test_an_end_on_the_limit_is_a_stop_and_behind_it_is_not():
    def run(limit):
        [result] = finish(script_batch(SCRIPT, 4, tau=0.95, ends=(6,), max_new_tokens=limit))
        return result.ids, result.finish_reason

    assert run(4) == ([3, 4, 5, 6], "stop")
    assert run(3) == ([3, 4, 5], "length")


def test_commits_are_shifted_to_the_cursor_and_finished_rows_are_left_alone():
    batch = script_batch(SCRIPT, 4, rows=3, tau=0.95, max_new_tokens=[2, 8, 5])
    before = None
    while not batch.over:
        batch.advance(1)
        state = batch.engine._state
        if state is None:  # given back with the last request
            break
        keys, cursor = np.array(state.cache[0].k)[:, 0, :, 0], np.array(state.cursor)
        values, tokens = np.array(state.cache[0].v)[:, 0, :, 0], np.array(state.tokens)
        for row, at in enumerate(cursor):
            np.testing.assert_array_equal(keys[row, :at], np.arange(at))
            np.testing.assert_array_equal(values[row, :at], tokens[row, :at])
        if before is not None:
            np.testing.assert_array_equal(values[0], before[0])
            assert cursor[0] == before[1]
        if np.array(state.done)[0]:
            before = values[0], cursor[0]
    assert before is not None
    assert [r.chunks for r in batch.results()] == [[2], [2, 3, 3], [2, 3]]


def test_tau_may_change_between_steps():
    batch = script_batch(SCRIPT, 4, tau=0.95)
    batch.advance(1)
    batch.engine.set_tau(1.0)
    batch.advance(1)
    batch.engine.set_tau(0.3)
    assert finish(batch)[0].chunks == [2, 1, 4, 1]


def test_sure_of_everything_is_still_one_token_at_tau_1():
    sure = script(TEXT, (1.0,) * 8, prompt_length=3)
    assert finish(script_batch(sure, 4))[0].chunks == [1] * 8
    assert finish(script_batch(sure, 4, measure="margin"))[0].chunks == [1] * 8
    assert finish(script_batch(sure, 4, measure="entropy"))[0].chunks == [1] * 8
    assert finish(script_batch(sure, 4, tau=0.999))[0].chunks == [4, 4]


def test_a_prompt_of_many_chunks_is_committed_but_for_its_last_token():
    long = script(TEXT, SURE, prompt_length=30)
    batch = script_batch(long, 4, tau=0.95)
    batch.advance(1)
    state = batch.engine._state
    assert np.array(state.cursor).tolist() == [30]  # the step committed the last
    np.testing.assert_array_equal(np.array(state.cache[0].k)[0, 0, :30, 0], np.arange(30))
    assert finish(batch)[0].chunks == [2, 3, 3]
