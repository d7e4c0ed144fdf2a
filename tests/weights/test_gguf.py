"""GGUF files written here with the gguf package's own writer, from Hugging Face tensors put through the permutation of
llama.cpp's converter (written out below), and read back."""

import sys

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="GGUF files need marsjax[gguf]")

from marsjax.models import Llama3Scaling, UnsupportedModel  # noqa: E402
from marsjax.weights import CheckpointError, convert, load  # noqa: E402

WORDS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q8_0"]
HEADS, KV_HEADS, SIZE, HEAD = 4, 2, 32, 8


def gguf_name(name):
    name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight"}.get(name, name)  # fmt: skip
    for theirs, ours in WORDS.items():
        name = name.replace(theirs + ".", ours + ".")
    return name.replace("model.layers.", "blk.")


def permuted(rows, heads):
    """Row by row: within a head, the first and second halves are interleaved."""
    head = len(rows) // heads
    out = np.empty_like(rows)
    for h in range(heads):
        for i in range(head // 2):
            out[h * head + 2 * i] = rows[h * head + i]
            out[h * head + 2 * i + 1] = rows[h * head + head // 2 + i]
    return out


def random_tensors(family, tied, layers=2, vocabulary=64, ffn=64):
    rng = np.random.default_rng(0)
    make = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    tensors = {"model.embed_tokens.weight": make(vocabulary, SIZE), "model.norm.weight": make(SIZE)}
    if not tied:
        tensors["lm_head.weight"] = make(vocabulary, SIZE)
    shapes = {"input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,), "mlp.gate_proj": (ffn, SIZE),
              "mlp.up_proj": (ffn, SIZE), "mlp.down_proj": (SIZE, ffn), "self_attn.q_proj": (HEADS * HEAD, SIZE),
              "self_attn.k_proj": (KV_HEADS * HEAD, SIZE), "self_attn.v_proj": (KV_HEADS * HEAD, SIZE),
              "self_attn.o_proj": (SIZE, HEADS * HEAD)}  # fmt: skip
    if family == "qwen3":
        shapes |= {"self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,)}
    for i in range(layers):
        tensors |= {f"model.layers.{i}.{name}.weight": make(*shape) for name, shape in shapes.items()}
        if family == "qwen2":
            for name in "qkv":
                rows = shapes[f"self_attn.{name}_proj"][0]
                tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = make(rows)
    return tensors


def write(path, family, tensors, *, kind="F32", fields=(), extra=(), tokenizer=None):
    writer = gguf.GGUFWriter(path, family)
    plain = {"block_count": 2, "context_length": 128, "embedding_length": SIZE, "feed_forward_length": 64,
             "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}  # fmt: skip
    for name, value in {**plain, **dict(fields)}.items():
        key = name if name.startswith(("split.", "tokenizer.")) else f"{family}.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{family}.rope.freq_base", 10000.0)
    if tokenizer is not None:
        tokenizer(writer)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, value in tensors.items():
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            value = permuted(value, HEADS if "q_proj" in name else KV_HEADS)
        matrix = value.ndim == 2 and kind != "F32"
        stored = gguf.quantize(value, quantisation) if matrix else value
        writer.add_tensor(gguf_name(name), stored, raw_dtype=quantisation if matrix else None)
    for name, value in dict(extra).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def by_hf_name(pretrained):
    from flax import nnx

    from marsjax.weights.names import entries

    found = {}
    for entry in entries(nnx.state(pretrained.model), pretrained.model.config.num_layers):
        value = np.asarray(entry.variable[...])
        found[entry.names[0]] = value.T if entry.transpose else value
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_arrays_of_every_family(tmp_path, family, tied):
    tensors = random_tensors(family, tied)
    pretrained = load(write(tmp_path / "m.gguf", family, tensors, fields={"attention.key_length": HEAD}))
    config = pretrained.model.config
    assert (config.family, config.tie_embeddings, config.head_dim) == (family, tied, HEAD)
    assert (config.rope_theta, config.norm_eps, config.max_positions) == (10000.0, 1e-5, 128)
    found = by_hf_name(pretrained)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("kind", ["F16", "BF16", *QUANTISED])
def test_types(tmp_path, kind):
    tensors = random_tensors("llama", tied=True)
    found = by_hf_name(load(write(tmp_path / "m.gguf", "llama", tensors, kind=kind)))
    quantisation = gguf.GGMLQuantizationType[kind]
    step = {"Q4_0": 0.25, "Q4_1": 0.2, "Q5_0": 0.15, "Q8_0": 0.02, "F16": 1e-3, "BF16": 1e-2}[kind]
    for name, value in tensors.items():
        if value.ndim == 2:
            expected = gguf.dequantize(gguf.quantize(value, quantisation), quantisation)
            np.testing.assert_array_equal(found[name], expected.reshape(value.shape), err_msg=name)
            assert np.abs(found[name] - value).max() < step * np.abs(value).max()


def decode_q4_k(block):
    """One block of 256 values, written from the format's description: 8 groups of 32, 6-bit scales and minima."""
    d, dmin = block[:4].view(np.float16).astype(np.float32)
    packed, nibbles, out = block[4:16], block[16:144], []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4)
            minimum = (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4)
        values = nibbles[32 * (group // 2) : 32 * (group // 2) + 32]
        values = values >> 4 if group % 2 else values & 15
        out.append(d * np.float32(scale) * values.astype(np.float32) - dmin * np.float32(minimum))
    return np.concatenate(out)


def decode_q6_k(block):
    """One block of 256 values: low 4 bits, high 2 bits, 16 signed 8-bit scales, one factor."""
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    d = block[208:210].view(np.float16).astype(np.float32)[0]
    out = np.empty(256, np.float32)
    for half in range(2):
        for i in range(32):
            for quarter in range(4):
                byte = low[64 * half + i + 32 * (quarter % 2)]
                value = (byte & 15 if quarter < 2 else byte >> 4) | (((high[32 * half + i] >> 2 * quarter) & 3) << 4)
                position = 128 * half + 32 * quarter + i
                out[position] = d * np.float32(scales[position // 16]) * np.float32(int(value) - 32)
    return out


@pytest.mark.parametrize(("kind", "size", "decode"), [("Q4_K", 144, decode_q4_k), ("Q6_K", 210, decode_q6_k)])
def test_k_types(tmp_path, kind, size, decode):
    """Blocks of random bits with sane factors; the gguf package cannot write these types, so nothing is quantised."""
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (SIZE, size), dtype=np.uint8)
    factors = rng.uniform(0.01, 0.1, (SIZE, 2)).astype(np.float16).view(np.uint8)
    raw[:, : 4 if kind == "Q4_K" else 0] = factors[:, : 4 if kind == "Q4_K" else 0]
    if kind == "Q6_K":
        raw[:, 208:210] = factors[:, :2]
    tensors = random_tensors("llama", tied=True, ffn=256)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter.add_tensor

    def add(self, name, value, raw_dtype=None):
        if "ffn_down" in name:
            value, raw_dtype = raw, gguf.GGMLQuantizationType[kind]
        writer(self, name, value, raw_dtype=raw_dtype)

    gguf.GGUFWriter.add_tensor = add
    try:
        write(path, "llama", tensors, fields={"feed_forward_length": 256})
    finally:
        gguf.GGUFWriter.add_tensor = writer
    found = by_hf_name(load(path))["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_allclose(found, np.stack([decode(row) for row in raw]), rtol=1e-6)


def factors(scaling, theta=10000.0):
    """The divisors of rope frequencies, pair by pair, as llama.cpp's converter writes them."""
    out = []
    for i in range(0, HEAD, 2):
        wavelength = 2 * np.pi * theta ** (i / HEAD)
        low, high = (scaling.original_max_positions / f for f in (scaling.low_freq_factor, scaling.high_freq_factor))
        if wavelength < high:
            out.append(1.0)
        elif wavelength > low:
            out.append(scaling.factor)
        else:
            smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            out.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(out, np.float32)


def test_llama3_scaling_is_recovered(tmp_path):
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 2048)
    assert 1 < factors(scaling)[2] < 8  # one pair in the transition
    path = write(
        tmp_path / "m.gguf", "llama", random_tensors("llama", True),
        extra={"rope_freqs.weight": factors(scaling)}, fields={"rope.scaling.original_context_length": 2048},
    )  # fmt: skip
    assert load(path).model.config.rope_scaling == scaling


def test_other_rope_factors_are_refused(tmp_path):
    odd = np.array([1, 2, 3, 4], np.float32)
    path = write(tmp_path / "m.gguf", "llama", random_tensors("llama", True), extra={"rope_freqs.weight": odd})
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        load(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope.scaling.type": "yarn"}, "'yarn'"),
        ({"expert_count": 8}, "mixture of 8 experts"),
        ({"attention.sliding_window": 64}, r"sliding window attention \(64\)"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"rope.dimension_count": 4}, "rope.dimension_count 4"),
        ({"attention.head_count": [4, 2]}, "differs from layer to layer"),
        ({"block_count": None, "embedding_length": None}, r"(?s)lacks llama.block_count.*lacks llama.embedding_length"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, fields, message):
    with pytest.raises(UnsupportedModel, match=message):
        load(write(tmp_path / "m.gguf", "llama", random_tensors("llama", True), fields=fields))


def test_architecture_is_named(tmp_path):
    with pytest.raises(UnsupportedModel, match="'gemma2'"):
        load(write(tmp_path / "m.gguf", "gemma2", {}))


def test_damaged_files(tmp_path):
    path = write(tmp_path / "m.gguf", "llama", random_tensors("llama", True))
    content = path.read_bytes()
    for cut, message in ((0, "too short"), (100, "truncated"), (900, "truncated"), (len(content) - 40, "truncated")):
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=message):
            load(path)
    path.write_bytes(b"GGML" + content[4:])
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load(path)
    path.write_bytes(content[:4] + b"\x09\0\0\0" + content[8:])
    with pytest.raises(CheckpointError, match="version 9"):
        load(path)


def test_a_file_cut_anywhere_is_told(tmp_path):
    add, _ = byte_level()
    path = write(tmp_path / "m.gguf", "llama", random_tensors("llama", True, vocabulary=288), tokenizer=add)
    content = path.read_bytes()
    for cut in [*range(0, 12_000, 131), *range(12_000, len(content), 9973), len(content) - 1]:
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"too short|truncated"):
            load(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"attention.head_count": 0},
        {"attention.head_count": "many"},
        {"embedding_length": [1]},
        {"tokenizer.ggml.merges": ["a"]},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.pre": ["qwen2"]},
        {"tokenizer.ggml.eos_token_id": "end"},
    ],
)
def test_metadata_of_wrong_types_are_damage(tmp_path, fields):
    plain = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*BYTES, *SPECIAL]}
    path = write(tmp_path / "m.gguf", "llama", random_tensors("llama", True), fields={**plain, **fields})
    with pytest.raises(CheckpointError, match=r"(?s)m.gguf has damaged metadata \(\w+: .*; fetch it again"):
        load(path)


def test_missing_and_unexpected_tensors_in_one_report(tmp_path):
    tensors = random_tensors("llama", True)
    del tensors["model.norm.weight"]
    path = write(tmp_path / "m.gguf", "llama", tensors, extra={"blk.0.ffn_gate_exps.weight": np.ones((2, 2), "f4")})
    with pytest.raises(CheckpointError, match=r"(?s)missing: model.norm.weight.*unexpected: blk.0.ffn_gate_exps"):
        load(path)


def test_without_the_gguf_package(monkeypatch, tmp_path):
    path = write(tmp_path / "m.gguf", "llama", random_tensors("llama", True))
    for module in ("marsjax.weights.gguf", "marsjax.weights.gguf_file"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'marsjax\[gguf\]'"):
        load(path)


# --- tokenizer ---

BYTES = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTES += [chr(256 + n) for n in range(256 - len(BYTES))]
SPECIAL = ["<|end|>", "<|start|>", "<tool>"]


def byte_level(pre="qwen2", model="gpt2", add_bos=None, spare=0):
    """Byte tokens, a few merges, two control tokens, one user-defined token, names of spare rows."""
    merges = ["Ġ a", "1 2", "12 3", "Ċ Ċ", "Ġ Ġ", "t h"]
    tokens = BYTES + [merge.replace(" ", "") for merge in merges] + SPECIAL + [f"[PAD{i}]" for i in range(spare)]
    types = [1] * (len(BYTES) + len(merges)) + [3, 3, 4] + [5] * spare
    end = len(BYTES) + len(merges)

    def add(writer):
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_eos_token_id(end)
        writer.add_bos_token_id(end + 1)
        writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}")
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    return add, tokens


def read_tokenizer(tmp_path, family="llama", **options):
    add, tokens = byte_level(**options)
    path = write(tmp_path / "m.gguf", family, random_tensors(family, True, vocabulary=288), tokenizer=add)
    return load(path), tokens


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("pre", "digits", "spaces"),
    [
        ("qwen2", ["1", "2", "3"], ["x", "ĠĠ", "Ġa"]),
        ("smollm", ["1", "2", "3"], ["x", "ĠĠ", "Ġa"]),
        ("llama-bpe", ["123"], ["x", "ĠĠ", "Ġa"]),
        ("gpt-2", ["123"], ["x", "ĠĠ", "Ġa"]),
        ("default", ["123"], ["x", "ĠĠ", "Ġa"]),
        (None, ["123"], ["x", "ĠĠ", "Ġa"]),
    ],
)
def test_pre_tokenizers(tmp_path, pre, digits, spaces):
    tokenizer = read_tokenizer(tmp_path, pre=pre)[0].tokenizer
    assert pieces(tokenizer, "123") == digits
    assert pieces(tokenizer, "x   a") == spaces
    blank = pieces(tokenizer, "\n\n1")
    # GPT-2's rule leaves the last white space before a digit alone; digits that are split off first do not.
    assert blank == (["Ċ", "Ċ", "1"] if pre in ("gpt-2", "default", None) else ["ĊĊ", "1"])


def test_ids_special_tokens_and_template(tmp_path):
    pretrained, tokens = read_tokenizer(tmp_path)
    tokenizer = pretrained.tokenizer
    assert [tokenizer.convert_tokens_to_ids(token) for token in tokens] == list(range(len(tokens)))
    assert len(tokenizer) == len(tokens)
    assert pieces(tokenizer, "th<|end|>\n<tool>é") == ["th", "<|end|>", "Ċ", "<tool>", "Ã", "©"]
    end = tokens.index("<|end|>")
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, pretrained.generation.eos_ids) == (end, end + 1, (end,))
    assert pretrained.generation.pad_id not in (None, end)
    text = "Ünïcode 東京 \U0001f642 <tool> 12 3  x\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode([end, 5], skip_special_tokens=True) == tokens[5]
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|start|>a<|end|>"


def test_qwen_normalises_and_others_do_not(tmp_path):
    composed, decomposed = "\u00e9", "e\u0301"
    qwen = read_tokenizer(tmp_path, pre="qwen2")[0].tokenizer
    assert qwen(decomposed)["input_ids"] == qwen(composed)["input_ids"]
    smollm = read_tokenizer(tmp_path, pre="smollm")[0].tokenizer
    assert smollm(decomposed)["input_ids"] != smollm(composed)["input_ids"]


@pytest.mark.parametrize(("pre", "flag", "added"), [("qwen2", None, False), ("qwen2", True, True),
                                                    ("llama3", None, True), ("llama3", False, False)])  # fmt: skip
def test_start_token(tmp_path, pre, flag, added):
    tokenizer = read_tokenizer(tmp_path, pre=pre, add_bos=flag)[0].tokenizer
    assert (tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id) == added


def test_names_of_spare_rows_are_no_tokens(tmp_path):
    add, tokens = byte_level(spare=12)
    path = write(tmp_path / "m.gguf", "qwen2", random_tensors("qwen2", True, vocabulary=len(tokens)), tokenizer=add)
    pretrained = load(path, with_mask_token=True)
    assert pretrained.mask_id == len(tokens) - 12
    assert pretrained.model.config.vocab_size == len(tokens)


@pytest.mark.parametrize(("options", "message"), [({"pre": "tekken"}, "'tekken'.*known are .*qwen2"),
                                                  ({"model": "llama"}, "SentencePiece")])  # fmt: skip
def test_unknown_tokenizers_are_named(tmp_path, options, message):
    with pytest.raises(UnsupportedModel, match=message):
        read_tokenizer(tmp_path, **options)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_convert_to_a_directory(tmp_path, family, arrays):
    pretrained, _ = read_tokenizer(tmp_path, family=family)
    back = load(convert(tmp_path / "m.gguf", tmp_path / "out", mask_token=True))
    assert back.mask_id == len(pretrained.tokenizer)
    text = "th 123  a\n<|end|>é"
    assert back.tokenizer(text)["input_ids"] == pretrained.tokenizer(text)["input_ids"]
    assert back.tokenizer.chat_template == pretrained.tokenizer.chat_template
    for path, value in arrays(pretrained.model).items():
        rows = len(pretrained.tokenizer) if path[0] == "embed_table" else None
        np.testing.assert_array_equal(arrays(back.model)[path][:rows], value[:rows])
