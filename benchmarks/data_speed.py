"""Rows a second of one core: read by index from what `marsjax data build` wrote, against made from conversations.

    python benchmarks/data_speed.py --source jsonl:gsm8k_train.jsonl --model demo --length 512

Both read the same rows in the same shuffled order, in one thread, and give the same rows. Batches are those of training
(built or tokenised at the start), with prefetch.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from marsjax.data.batch import BatchFormat
from marsjax.data.build import build
from marsjax.data.built import BuiltRows
from marsjax.data.loading import row_maker
from marsjax.data.pipeline import TrainBatches
from marsjax.data.sources import open_source
from marsjax.data.tokenizers import tokenizer_and_mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4000, help="rows to read")
    parser.add_argument("--batch-size", type=int, default=32)
    asked = parser.parse_args()

    tokenizer, mask_id = tokenizer_and_mask(asked.model)
    maker = row_maker(tokenizer, asked.length, mask_id, None, {})
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "rows"
        found, building = timed(lambda: build(asked.source, out, maker, num_workers=0))
        built, opening = timed(lambda: BuiltRows(out, maker))
        sizes, planning = timed(built.sizes)
        order = np.random.default_rng(0).permutation(len(built))[: asked.rows]
        read, reading = timed(lambda: [built[i] for i in order])

        conversations = open_source(asked.source, in_full=False)
        # The row's conversation, as far as rows and conversations are one to one: those dropped are left out.
        kept = [i for i in range(len(conversations)) if len(maker(conversations[i])) == 1]
        assert len(kept) == len(built), "a conversation gave several rows; take another source"
        made, making = timed(lambda: [maker(conversations[kept[i]])[0] for i in order])
        assert all(np.array_equal(a.ids, b.ids) for a, b in zip(read, made, strict=True))

        end = int(tokenizer.eos_token_id)
        form = BatchFormat(asked.batch_size, asked.length, 4, mask_id=mask_id, end_id=end)
        batches = TrainBatches(built, form, seed=0)
        next(batches)
        count = max(asked.rows // asked.batch_size, 1)
        tokens, batching = timed(lambda: sum(int((next(batches).segments > 0).sum()) for _ in range(count)))
        batches.close()
        size = sum(path.stat().st_size for path in out.iterdir())
    result = {
        "source": asked.source,
        "model": asked.model,
        "rows": len(built),
        "tokens_a_row": round(found.stats.tokens / found.stats.rows, 1),
        "bytes_a_token": round(size / found.stats.tokens, 2),
        "build_rows_per_second": round(len(built) / building),
        "open_seconds": round(opening, 4),
        "sizes_seconds": round(planning, 4),
        "read_rows_per_second": round(len(order) / reading),
        "tokenise_rows_per_second": round(len(order) / making),
        "times_faster": round(making / reading, 1),
        "batches_tokens_per_second": round(tokens / batching),
    }
    assert len(sizes.tokens) == len(built)
    print(json.dumps(result, indent=1))


def timed(work):
    """What `work` gives, and the processor's seconds for it, which do not depend on what else runs."""
    begin = time.process_time()
    found = work()
    return found, time.process_time() - begin


if __name__ == "__main__":
    main()
