import subprocess
import sys

import jax
import pytest

from marsjax import cli, compilation_cache
from marsjax.compilation_cache import use_compilation_cache


@pytest.fixture(autouse=True)
def unset(monkeypatch, tmp_path):
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
    before = [getattr(jax.config, name) for name in names]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("MARSJAX_NO_COMPILATION_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


def test_where_programs_are_kept(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("MARSJAX_NO_COMPILATION_CACHE", "1")
    assert use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.delenv("MARSJAX_NO_COMPILATION_CACHE")
    assert use_compilation_cache() == tmp_path / "cache" / "marsjax" / "xla"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "marsjax" / "xla")
    jax.config.update("jax_compilation_cache_dir", "/elsewhere")  # as JAX_COMPILATION_CACHE_DIR does
    assert str(use_compilation_cache()) == "/elsewhere"
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert use_compilation_cache() is None
    assert "compiled programs are not kept" in caplog.text


@pytest.mark.parametrize("argv", [
    ("train", "no.yaml"), ("demo", "--problems", "0"), ("generate", "--model", "./nowhere", "--prompt", "a"),
])  # fmt: skip
def test_commands_that_compile_turn_it_on(monkeypatch, argv, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(compilation_cache, "use_compilation_cache", lambda: asked.append(1))
    assert cli.main(list(argv)) == 1
    assert asked == [1]


def test_a_second_process_finds_the_programs(tmp_path):
    code = (
        "import jax; from marsjax.compilation_cache import use_compilation_cache; use_compilation_cache();"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0);"
        "from jax import monitoring as m; seen = [];"
        "m.register_event_listener(lambda name, **_: seen.append(name));"
        "jax.jit(lambda x: x * 2 + 1)(1.0);"
        "print(sum(name == '/jax/compilation_cache/cache_hits' for name in seen))"
    )
    counts = [int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout) for _ in "ab"]
    assert counts[0] == 0
    assert counts[1] > 0
