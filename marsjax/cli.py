"""`marsjax`: parses, calls one function, prints. Heavy imports wait until a command has been understood."""

import json
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg, subcommand

from marsjax.decoding.options import Options

Dtype = Literal["float32", "bfloat16", "float16"]
How = Annotated[Options, arg(name="")]  # its fields are options of the command
DEFAULT = Options()
DEMO_PROBLEMS = 384


def demo(
    *,
    out: Path | None = None,
    quick: bool = False,
    seed: int = 0,
    problems: int = DEMO_PROBLEMS,
    overrides: Annotated[tuple[str, ...], arg(name="set", metavar="section.key=value")] = (),
    model: Literal["own", "smollm2"] = "own",
    source: str | None = None,
) -> int:
    """Watch a small model go from one token a forward pass to several: fine-tune, decode, report. Minutes on a CPU.

    Writes report.html, report.json and the fine-tuned model (training/export) into OUT. Needs no network. An unfinished
    run goes on where it stopped. With --model smollm2 nothing is trained, and the model comes from the hub or SOURCE.

    Args:
        out: directory for the results; by default demo-out, with smollm2 demo-out/smollm2.
        model: own: fine-tune this package's model with MARS. smollm2: SmolLM2-135M-Instruct as it is, with an adapter
            that comes with this package, answers the same text in fewer forward passes.
        source: with smollm2: its directory or .gguf file; by default it is fetched from the hub.
        quick: forty steps of training and 64 problems, to see that everything works.
        seed: of the training data's order and of the held-out problems.
        problems: held-out problems to decode at each threshold.
        overrides: changes to the training configuration, e.g. --set optimizer.steps=1000.
    """
    _keep_compiled_programs()
    if model == "smollm2":
        if quick or seed or problems != DEMO_PROBLEMS or overrides:
            raise ValueError("--quick, --seed, --problems and --set go with --model own")
        from marsjax.instruct_demo import SOURCE
        from marsjax.instruct_demo import demo as show

        show(out or Path("demo-out/smollm2"), source=SOURCE if source is None else source)
        return 0
    if source is not None:
        raise ValueError(f"--source {source} goes with --model smollm2")
    from marsjax.demo import demo as run

    run(out or Path("demo-out"), quick=quick, seed=seed, problems=problems, overrides=overrides)
    return 0


def train(config: Positional[Path], overrides: Positional[tuple[str, ...]] = ()) -> int:
    """Fine-tune a model (or train one from scratch) as a configuration file says.

    Example: marsjax train configs/smollm2_gsm8k_mars.yaml optimizer.steps=200 output.directory=runs/try

    Metrics, checkpoints and the exported model go to output.directory; the same command goes on from there after a
    stop. Every key with its default: marsjax settings.

    Args:
        config: YAML file; see configs/ for examples.
        overrides: section.key=value, the last one wins.
    """
    _keep_compiled_programs()
    from marsjax.parallel.start import is_main
    from marsjax.training import load_config
    from marsjax.training import train as run

    result = run(load_config(config, overrides))
    if is_main():
        at = f"; exported to {result.export}" if result.export else ""
        print(f"{result.steps} steps in {result.seconds:.0f} s{at}")
    return 0


def plan(
    config: Positional[Path],
    overrides: Positional[tuple[str, ...]] = (),
    *,
    topology: str | None = None,
    search: bool = False,
    decode: bool = False,
    lanes: int = 32,
    cache_length: int = 1024,
    how: How = DEFAULT,
    json_: Annotated[bool, arg(name="json")] = False,
) -> int:
    """Compile a configuration's train (or decode) step for a TPU slice that is not here: memory, FLOPs, traffic, time.

    Example: marsjax plan configs/qwen2.5_7b_mars_b4.yaml --topology v5p-32

    Needs the TPU's compiler (pip install libtpu), no TPU and no network for published models. The exit code is 1 if the
    step does not fit the chips.

    Args:
        config: YAML file; see configs/ for examples.
        overrides: section.key=value, the last one wins.
        topology: such as v5p-32, v5e-64 or v5p:2x2x4; by default parallel.accelerator.
        search: try meshes and microbatches of the same global batch, and name the quickest that fits.
        decode: plan a decode step of the model instead, of the strategy named.
        lanes: with --decode: answers under way at a time.
        cache_length: with --decode: positions of the cache a lane.
        json_: print one JSON object a plan.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler is there for a TPU that is not: do not look for one
    from marsjax.parallel.slices import parse_slice
    from marsjax.training import load_config, plan_table
    from marsjax.training import plan as planning

    if search and decode:
        raise ValueError("--search is for training; of a decode step give --lanes")
    loaded = load_config(config, overrides)
    slice_ = parse_slice(topology) if topology is not None else None
    if decode:
        found_plans = iter([planning.plan_decode(loaded, slice_, options=how, lanes=lanes, length=cache_length)])
    else:
        found_plans = planning.search(loaded, slice_) if search else iter([planning.plan(loaded, slice_)])
    plans = []
    for found in found_plans:
        plans.append(found)
        print(json.dumps(found.to_dict(), allow_nan=False) if json_ else plan_table.show(found), flush=True)
    chosen = planning.best(plans)
    if search and not json_:
        print(plan_table.choice(chosen, len(plans)))
    return 0 if chosen is not None else 1


def export(
    run: Positional[Path], out: Positional[Path | None] = None, *, step: int | None = None, dtype: Dtype | None = None
) -> int:
    """Write a checkpoint of a run as a Hugging Face directory, on any machine that can hold its weights.

    Example: marsjax export runs/mine --step 500

    Args:
        run: output.directory of the run.
        out: directory to write; by default RUN/export, or RUN/export-STEP with --step.
        step: of the checkpoint; by default the newest that can be read.
        dtype: of the written weights; by default output.export_dtype.
    """
    from marsjax.training.export import export as write

    path, at = write(run, out, step=step, dtype=dtype)
    print(f"step {at}: {path}")
    return 0


def settings() -> int:
    """List every key of a training configuration with its default and meaning."""
    from marsjax.training import describe

    print(describe())
    return 0


def generate(
    *,
    model: str,
    prompt: list[str],
    tau: float | None = None,
    measure: Literal["probability", "margin", "entropy"] = "probability",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    system: str | None = None,
    raw: bool = False,
    ignore_eos: bool = False,
    how: How = DEFAULT,
    adapter: str | None = None,
    draft: str | None = None,
    verification: Literal["coupled", "rejection"] = "coupled",
    dtype: Dtype = "float32",
    show_chunks: bool = False,
    json_: Annotated[bool, arg(name="json")] = False,
) -> int:
    """Answer prompts, several tokens a forward pass if the model was fine-tuned with MARS and tau is below 1.

    Example: marsjax generate --model demo-out/training/export --prompt "Sort these names: Tom, Eva, Ada." --tau 0.95

    Args:
        model: Hugging Face directory, hub id (owner/name) or .gguf file.
        prompt: what the user says; several prompts are answered as one batch. "-" reads standard input.
        tau: go on accepting predictions while their confidence is at least this; 1 (or nothing) is one token a
            forward pass, lower is faster. With --measure entropy: at most this, in nats.
        measure: what confidence is: the token's probability, the margin to the second, or the entropy.
        max_new_tokens: limit of each answer.
        temperature: 0 is greedy.
        top_k: sample from the k likeliest tokens only.
        top_p: sample from the likeliest tokens that hold this much probability.
        seed: of sampling; the same seed gives the same answer.
        stop: texts that end an answer and are not part of it.
        system: system message put before each prompt.
        raw: continue the prompt as plain text, without the chat template.
        ignore_eos: go on past end tokens, up to the limit.
        adapter: what was trained beside the model, by marsjax or PEFT: directory or hub id.
        draft: a second, smaller model of the same vocabulary that guesses (--strategy speculative).
        verification: of sampled drafts: coupled gives the text that ar gives with this seed, rejection another one of
            the same distribution (over a tree: the same too).
        dtype: of weights and computation.
        show_chunks: shade the text by what each forward pass gave, and print the counts.
        json_: print one JSON object a prompt.
    """
    _keep_compiled_programs()
    from marsjax.decoding.generator import Generator
    from marsjax.decoding.requests import check_options

    prompts = [sys.stdin.read() if text == "-" else text for text in prompt]
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options: dict[str, Any] = {"tau": tau, "measure": measure, "max_new_tokens": max_new_tokens, **sampling}
    options["verification"] = verification
    check_options(len(prompts), **options)  # wrong options are refused before the model is read
    if raw and system is not None:
        raise ValueError("--raw takes plain text, so there is no place for --system")
    generator = Generator.load(model, adapter=adapter, dtype=dtype, draft=draft, **vars(how))
    asked: list[Any] = list(prompts)
    if system is not None:
        asked = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in prompts]
    options |= {"stop": stop, "ignore_eos": ignore_eos, "raw": raw}
    if len(prompts) == 1 and not (json_ or show_chunks):
        for chunk in generator.stream(asked[0], **options):
            print(chunk.text, end="", flush=True)
        print()
        return 0
    for text, result in zip(prompts, generator.generate(asked, **options), strict=True):
        if json_:
            print(json.dumps({"prompt": text, **result.to_dict()}, ensure_ascii=False))
        elif show_chunks:
            _print_chunks(generator.tokenizer, result)
        else:
            print(f"> {text}\n{result.text}\n")
    return 0


def _print_chunks(tokenizer, result) -> None:
    import rich

    from marsjax.evaluation.shading import for_terminal

    if tokenizer is None:
        raise ValueError("--show-chunks needs a model with a tokenizer")
    rich.print(for_terminal(tokenizer, result))
    print(
        f"{len(result.ids)} tokens in {result.forwards} forward passes: {result.tokens_per_forward:.2f} a pass; "
        f"ended by {result.finish_reason}"
    )


def convert(
    src: Positional[str],
    dst: Positional[Path],
    *,
    adapter: str | None = None,
    dtype: Dtype | None = None,
    mask_token: bool = False,
) -> int:
    """Write any checkpoint that marsjax reads as a Hugging Face directory that transformers loads.

    Example: marsjax convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2

    Example: marsjax convert HuggingFaceTB/SmolLM2-135M-Instruct tuned --adapter runs/mine/export

    Args:
        src: Hugging Face directory, hub id or .gguf file.
        dst: directory to write; files of an earlier export there are replaced.
        adapter: what was trained beside src (directory or hub id), to be merged into its weights; a gated adapter
            cannot be.
        dtype: of the written weights; by default as in the source (float32 from a .gguf file).
        mask_token: reserve and initialise a row for the mask token, as training does.
    """
    from marsjax.weights import convert as run

    print(run(src, dst, adapter=adapter, dtype=dtype, mask_token=mask_token))
    return 0


def batch(
    source: Positional[Path],
    target: Positional[Path],
    *,
    model: str,
    tau: float | None = None,
    max_new_tokens: int = 256,
    lanes: int = 16,
    how: How = DEFAULT,
    adapter: str | None = None,
    draft: str | None = None,
    dtype: Dtype = "float32",
    resume: bool = False,
) -> int:
    """Answer a file of OpenAI batch requests (a JSON object a line) into another, `lanes` at a time.

    A line that is no good request is answered by an error under its id; the exit code is 1 if there was one.

    Example: marsjax batch requests.jsonl answers.jsonl --model runs/mine/export --tau 0.95

    Args:
        source: lines with custom_id, url (/v1/chat/completions or /v1/completions) and body.
        target: file for the answers, in the order in which they get ready.
        model: Hugging Face directory, hub id or .gguf file.
        tau: for requests that say neither tau nor measure.
        max_new_tokens: for requests without max_tokens.
        lanes: requests answered at a time.
        adapter: what was trained beside the model, by marsjax or PEFT: directory or hub id.
        draft: a second, smaller model of the same vocabulary that guesses (--strategy speculative).
        dtype: of weights and computation.
        resume: keep the answers that target has already, and go on.
    """
    from marsjax.decoding.requests import check_options
    from marsjax.serving import batch_file

    defaults = {"tau": tau, "max_new_tokens": max_new_tokens}
    check_options(1, **defaults)
    batch_file.check_files(source, target, resume)
    _keep_compiled_programs()
    from marsjax.decoding.generator import Generator

    generator = Generator.load(model, adapter=adapter, dtype=dtype, draft=draft, lanes=lanes, **vars(how))
    summary = batch_file.run(generator, source, target, model=model, defaults=defaults, resume=resume)
    sums = summary.statistics
    kept = f" ({summary.kept} were there)" if summary.kept else ""
    print(
        f"{summary.answered} answered{kept}, {summary.failed} failed; {sums.new_tokens} tokens, "
        f"{sums.tokens_per_forward:.2f} a forward, {sums.decode_seconds + sums.prefill_seconds:.1f} s: {target}"
    )
    if summary.first_failure is not None:
        print(f"marsjax: the first that failed, {summary.first_failure}", file=sys.stderr)
    return 1 if summary.failed else 0


def plan_slots(
    strategy: Positional[
        Literal["ar", "mars", "chain", "comb", "tree", "speculative", "lookup", "jacobi", "block", "block_diffusion"]
    ],
    *,
    window: int | None = None,
    k: int | None = None,
    block_complexity: int | None = None,
    widths: tuple[int, ...] | None = None,
    cache_block: int | None = None,
    diffusion_block: int | None = None,
) -> int:
    """Draw what one forward pass of a strategy is fed.

    Example: marsjax plan-slots comb --k 3

    Args:
        strategy: as in marsjax generate.
        window: predictions a forward pass (mars, speculative).
        k: drafts in a row (chain, comb, speculative, lookup, jacobi), depth of a tree.
        block_complexity: slots a tree feeds, at most.
        widths: drafts at each depth of a tree of fixed form.
        cache_block: positions of a block of the paper's cache (block).
        diffusion_block: positions of a block (block_diffusion).
    """
    from marsjax.decoding import picture, strategies

    options = Options(
        strategy=strategy,
        window=window,
        k=k,
        block_complexity=block_complexity,
        widths=widths,
        cache_block=cache_block,
        diffusion_block=diffusion_block,
    )
    print(picture.draw(strategies.plan_of(options)))
    return 0


@dataclass(frozen=True)
class Build:
    """Tokenise a source once, as training would, into files that training reads by index: data.train=rows:OUT.

    Conversations that cannot be used are dropped and counted; OUT/statistics.json says how many and why. The files are
    a data set of tensorflow-datasets too. Needs: pip install 'marsjax[data]'

    Example: marsjax data build hf:openai/gsm8k/main gsm8k-rows --model Qwen/Qwen2.5-0.5B-Instruct --length 512
    """

    source: Positional[str]
    """jsonl:PATH, arrayrecord:PATH, tfds:NAME[:SPLIT], hf:REPO[:SPLIT] or problems:SPLIT,count=N."""
    out: Positional[Path]
    """directory to write; it must not exist."""
    model: str
    """whose tokenizer: Hugging Face directory (weights are not read), hub id, .gguf file, or "demo"."""
    length: int
    """tokens a row, as data.length of the training."""
    shards: int | None = None
    """files to spread the rows over; by default one for 50,000 conversations."""
    num_workers: int | None = None
    """processes that tokenise; 0: this one. By default one a core for large sources."""
    template_kwargs: dict[str, str] = field(default_factory=dict)
    """arguments of the chat template, as data.template_kwargs of the training: NAME VALUE ..., values as in YAML."""

    def __call__(self) -> int:
        from marsjax.data.build import build
        from marsjax.data.statistics import describe

        maker = _row_maker(self.model, self.length, self.template_kwargs)
        found = build(self.source, self.out, maker, shards=self.shards, num_workers=self.num_workers)
        print(f"{describe(found)}\ntrain on it with data.train=rows:{self.out} data.length={self.length}")
        return 0


@dataclass(frozen=True)
class Stats:
    """Count what training would make of a source, and write nothing; or show what a built directory's build counted.

    Example: marsjax data stats my.jsonl --model demo --length 256
    """

    source: Positional[str]
    """as for build, or rows:DIRECTORY for what it wrote."""
    model: str | None = None
    """whose tokenizer, as for build."""
    length: int | None = None
    """tokens a row, as for build."""
    num_workers: int | None = None
    """processes that tokenise, as for build."""
    template_kwargs: dict[str, str] = field(default_factory=dict)
    """arguments of the chat template, as for build."""
    json_: Annotated[bool, arg(name="json")] = False
    """print one JSON object."""

    def __call__(self) -> int:
        from marsjax.data.loading import BUILT
        from marsjax.data.statistics import describe, read_statistics, survey, to_json

        if self.source.startswith(BUILT):
            found = read_statistics(Path(self.source.removeprefix(BUILT)).expanduser())
        elif self.model is None or self.length is None:
            raise ValueError(f"the tokens of {self.source} depend on --model and --length; give both")
        else:
            maker = _row_maker(self.model, self.length, self.template_kwargs)
            found = survey(self.source, maker, self.num_workers)
        print(json.dumps(to_json(found), ensure_ascii=False) if self.json_ else describe(found))
        return 0


def _row_maker(model: str, length: int, template_kwargs: dict[str, str]):
    import yaml

    from marsjax.data.loading import row_maker
    from marsjax.data.tokenizers import tokenizer_and_mask

    if length < 2:
        raise ValueError(f"--length must be at least 2, got {length}")
    tokenizer, mask_id = tokenizer_and_mask(model)
    values = {name: yaml.safe_load(value) for name, value in template_kwargs.items()}
    return row_maker(tokenizer, length, mask_id, None, values)


def data(
    command: Annotated[
        Annotated[Build, subcommand(name="build")] | Annotated[Stats, subcommand(name="stats")], arg(name="")
    ],
) -> int:
    """Tokenise data once and for all (build), or count what there is in it (stats)."""
    return command()


def _keep_compiled_programs() -> None:
    from marsjax import compilation_cache

    compilation_cache.use_compilation_cache()


TRY_AGAIN = 42  # exit code of what a new start may mend; launch/ starts such runs again


def _exit_code(error: Exception) -> int:
    """1; of several processes whose devices or files failed for other reasons than memory and room, TRY_AGAIN."""
    if "jax" not in sys.modules:
        return 1
    import errno

    import jax

    if not jax.distributed.is_initialized():
        return 1
    if isinstance(error, jax.errors.JaxRuntimeError):
        return 1 if "RESOURCE_EXHAUSTED" in str(error) else TRY_AGAIN
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    transient = cause is not None and cause.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)
    return TRY_AGAIN if transient else 1


def _give_up(code: int) -> int:
    """The exit code; one of several processes ends at once, or it would wait at its end for the others."""
    if "jax" in sys.modules:
        from marsjax.parallel.start import give_up

        give_up(code)
    return code


def _without_source(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> str:
    return f"marsjax: {'' if category is UserWarning else f'{category.__name__}: '}{message}\n"


COMMANDS = {
    "demo": demo,
    "train": train,
    "generate": generate,
    "batch": batch,
    "convert": convert,
    "data": data,
    "plan": plan,
    "export": export,
    "settings": settings,
    "plan-slots": plan_slots,
}


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, 1 after an error (told in one message), 130 after an interrupt."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch, which nothing here needs
    if not os.environ.get("MARSJAX_TRACEBACK"):
        warnings.formatwarning = _without_source
    try:
        return tyro.extras.subcommand_cli_from_dict(
            COMMANDS,  # type: ignore[arg-type]
            prog="marsjax",
            description="Make a language model you already have generate several tokens per forward pass.",
            args=argv,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except KeyboardInterrupt as error:
        print(f"marsjax: {str(error) or 'interrupted'}", file=sys.stderr)
        return 130 if type(error) is KeyboardInterrupt else _give_up(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("MARSJAX_TRACEBACK"):
            raise
        told = isinstance(error, ValueError | TypeError | OSError | RuntimeError | ImportError)  # written for people
        print(f"marsjax: {error if told else f'{type(error).__name__}: {error}'}", file=sys.stderr)
        print("(set MARSJAX_TRACEBACK=1 to see where)", file=sys.stderr)
        return _give_up(_exit_code(error))


if __name__ == "__main__":
    sys.exit(main())
