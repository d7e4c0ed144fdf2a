from decoding_helpers import generator

PROMPT = [50, 9, 7, 22, 51]


def test_chunks_are_the_accepted_runs():
    result = generator().generate(PROMPT, tau=0.9, max_new_tokens=40)
    chunks = list(generator().stream(PROMPT, tau=0.9, max_new_tokens=40))
    assert [len(c.ids) for c in chunks] == result.chunks
    assert [i for c in chunks for i in c.ids] == result.ids
    assert [c.result is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert (chunks[-1].result.ids, chunks[-1].result.chunks) == (result.ids, result.chunks)


def test_tau_is_asked_before_every_forward_and_compiles_nothing(compilations):
    list(generator().stream(PROMPT, max_new_tokens=40))
    compilations.clear()
    asked = []

    def tau():
        asked.append(len(asked))
        return 1.0 if len(asked) <= 4 else 0.5

    chunks = list(generator().stream(PROMPT, tau=tau, max_new_tokens=40))
    lengths = [len(c.ids) for c in chunks]
    assert lengths[:3] == [1, 1, 1]
    assert max(lengths[4:]) == 4
    assert not compilations
