"""A model's own answers as training data: what it will be asked to foresee is its own text, not that of a data set.

    python benchmarks/own_answers.py requests --source jsonl:gsm8k_train.jsonl --count 800 --out requests.jsonl
    marsjax batch requests.jsonl answers.jsonl --model MODEL --strategy ar --lanes 24
    python benchmarks/own_answers.py conversations --requests requests.jsonl --answers answers.jsonl --out own.jsonl

The second file may be cut short: every answer in it counts that came to its end. One that its limit cut is left out, or
training would put an end where the model goes on. `jsonl:own.jsonl` is then a source of `marsjax train`.
"""

import json
import sys
from pathlib import Path

import tyro

from marsjax.data.sources import open_source
from marsjax.training.evaluate import held_out_prompts


def requests(*, source: str, out: Path, count: int = 800, max_tokens: int = 512) -> None:
    """The prompts of a source's first conversations as batch requests."""
    with out.open("w", encoding="utf-8") as file:
        for i, messages in enumerate(held_out_prompts(open_source(source), count)):
            body = {"model": "base", "messages": messages, "max_tokens": max_tokens}
            line = {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def conversations(*, requests: Path, answers: Path, out: Path) -> None:
    """Requests and their answers as conversations, in the order of the requests."""
    found, cut, failed = {}, 0, []
    for line in answers.read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        if (response := answer.get("response")) is None:
            failed.append(answer["error"]["message"])
            continue
        choice = response["body"]["choices"][0]
        if choice["finish_reason"] == "length":
            cut += 1
        else:
            found[answer["custom_id"]] = choice["message"]
    told = f"{cut} left out that reached their limit (requests --max-tokens); {len(failed)} failed"
    told += f", the first because: {failed[0]}" if failed else ""
    if not found:
        sys.exit(f"no answer in {answers} came to its end: {told}")
    with out.open("w", encoding="utf-8") as file:
        for line in requests.read_text(encoding="utf-8").splitlines():
            request = json.loads(line)
            if (message := found.get(request["custom_id"])) is not None and message["content"].strip():
                messages = [*request["body"]["messages"], message]
                file.write(json.dumps({"messages": messages}) + "\n")
    print(f"{len(found)} answers in {out}; {told}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"requests": requests, "conversations": conversations})
