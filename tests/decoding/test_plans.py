"""Slot plans: who sees whom, and where."""

import jax.numpy as jnp
import numpy as np
import pytest

from marsjax.decoding import plans


def test_comb_chain_and_mars():
    comb = plans.comb(3)
    assert comb.size == 16
    assert tuple(comb.heads) == (0, 1, 2, 3)
    assert comb.groups == ((4, 5, 6), (7, 8, 9), (10, 11, 12), (13, 14, 15))
    assert comb.depth.tolist() == [0, 1, 2, 3, 1, 2, 3, 2, 3, 4, 3, 4, 5, 4, 5, 6]
    assert np.flatnonzero(comb.sees[9]).tolist() == [0, 1, 7, 8, 9]
    chain = plans.chain(3)
    assert (chain.size, tuple(chain.heads), chain.groups) == (7, (0, 1, 2, 3), ((), (), (), (4, 5, 6)))
    assert chain.commits == comb.commits == 4
    assert plans.mars(4).judged == (3, 4, 5, 6)
    assert (plans.mars(4).window, plans.mars(4).commits, plans.mars(4).size) == (4, 4, 7)
    assert chain.is_chain
    assert comb.is_chain


def test_tree():
    """Three drafts behind the root, two behind the first of them, two masks behind each of the six heads."""
    tree = plans.tree((3, 2))
    assert tree.size == (2 + 1) * (1 + 5)
    assert tree.parents[:6] == (-1, 0, 0, 0, 1, 1)
    assert tree.head_parents.tolist() == [0, 0, 0, 1, 1]
    assert tree.depth[:6].tolist() == [0, 1, 1, 1, 2, 2]
    assert (tree.reach, tree.window, tree.commits, tree.is_chain) == (2, 3, 3, False)
    assert np.flatnonzero(tree.sees[tree.groups[5][1]]).tolist() == [0, 1, 5, *tree.groups[5]]


def test_a_dynamic_tree_sees_what_a_plan_of_its_form_sees():
    dynamic = plans.tree((4, 1), dynamic=True)
    for form in ((3, 2), (4, 1), (2, 3)):
        static = plans.tree(form)
        parents = jnp.asarray(static.head_parents)[None]
        assert np.array_equal(dynamic.sees_with(parents)[0], static.sees)


def test_speculative():
    plan = plans.speculative(2, 3)
    assert plan.kinds == (0, 0, 0, 1, 1, *(2,) * 6)
    assert plan.parents == (-1, 0, 1, 2, 3, 2, 5, 3, 7, 4, 9)
    assert (plan.reach, plan.tail, plan.window, plan.commits) == (2, 3, 5, 5)
    assert plan.head_rows == 3 + 2
    assert plan.with_pending(1).parents == (-1, 0, 1, 0, 3, 1, 5, 2, 7)


def test_sizes():
    for make in (plans.mars, plans.chain, plans.comb, plans.block):
        with pytest.raises(ValueError, match="positive integer"):
            make(0)
    with pytest.raises(ValueError, match="2048"):
        plans.comb(100)
