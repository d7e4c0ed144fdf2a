"""What the splash kernel visits of two-stream attention against what the mask allows; no kernel runs.

    python benchmarks/splash_tiles.py [--block-size 4] [--lengths 512 2048 8192] [--tile 128]

Prints a markdown table, one row for each clean length and share of noisy rows: the mask's pairs (of one document; the
mean over random compactions where M < L), the tiles visited and their area over the mask's, the same with the noisy
rows' own blocks taken out of the kernel and computed apart, and the tiles that `choose_tiles` takes instead.
"""

import argparse

import numpy as np

from marsjax.attention.splash import Layout, TwoStreamMask, choose_tiles, row_ids, visits


def mask_area(layout: Layout, columns: np.ndarray) -> int:
    """Allowed pairs, counted some rows at a time."""
    ids, keys = row_ids(layout, columns[None])[0], np.arange(layout.total, dtype=np.int32)
    keys = keys[(keys < layout.length) | (keys >= layout.start) & (keys < layout.start + layout.noisy)]
    rule = TwoStreamMask(layout.block_size, layout.start)
    return sum(int(rule(ids[some, None], keys[None]).sum()) for some in np.array_split(keys, -(-keys.size // 256)))


def compaction(length: int, noisy: int, block_size: int, rng: np.random.Generator) -> np.ndarray:
    blocks = np.sort(rng.permutation(length // block_size)[: noisy // block_size])
    return (blocks[:, None] * block_size + np.arange(block_size, dtype=np.int32)).reshape(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args()
    b, tile, rng = args.block_size, args.tile, np.random.default_rng(0)
    titles = ("L", "M", "mask pairs", f"tiles of {tile}²", "area / mask", "own blocks apart", "chosen tiles", "area")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for length in args.lengths:
        for noisy in (length, length * 5 // 8 // b * b):
            layout = Layout(length, noisy, b, tile)
            draws = 1 if noisy == length else 3
            pairs = np.mean([mask_area(layout, compaction(length, noisy, b, rng)) for _ in range(draws)])
            grid = visits(layout, tile, tile) > 0
            clean = grid[:, : layout.start // tile]
            chosen = choose_tiles(length, noisy, b, args.head_dim)
            area = (visits(Layout(length, noisy, b, chosen.unit), chosen.q, chosen.kv) > 0).sum() * chosen.q * chosen.kv
            apart = clean.sum() * tile**2 + noisy * b
            print(
                f"| {length} | {noisy} | {pairs:,.0f} | {grid.sum()} of {grid.size} | "
                f"{grid.sum() * tile**2 / pairs:.3f} | {apart / pairs:.3f} | {chosen.q} × {chosen.kv} | "
                f"{area / pairs:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
