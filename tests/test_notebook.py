"""The notebook runs from its first cell to its last, and shows what it says it shows."""

import ast
import os
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient (of the test extra) runs the notebook")
nbformat = pytest.importorskip("nbformat", reason="nbformat (of the test extra) reads the notebook")

PATH = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"
PARAMETERS = "STEPS, PROBLEMS, TAUS = 2, 8, (1.0, 0.5)"


def shown(cell) -> str:
    """Text and HTML of a cell's outputs."""
    parts = [output.get("text") or output.get("data", {}).get("text/html", "") for output in cell.get("outputs", [])]
    return "\n".join(parts)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A copy, run in a kernel of its own with few steps; compiled without optimisation, which takes longer than it."""
    notebook = nbformat.read(PATH, as_version=4)
    parameters = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    notebook.cells.insert(parameters + 1, nbformat.v4.new_code_cell(PARAMETERS))
    directory = tmp_path_factory.mktemp("notebook")
    environment = {
        "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "TMPDIR": str(directory), "IPYTHONDIR": str(directory), "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }  # fmt: skip
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=900, resources={"metadata": {"path": str(PATH.parent)}}
    )
    client.execute(env={**os.environ, **environment})
    return notebook.cells


def test_it_fine_tunes_generates_and_compares(executed):
    output = "\n".join(shown(cell) for cell in executed)
    assert "one token a forward pass" in output
    assert re.search(r"step 2/2 +loss \d", output)
    assert "mask, offset 5" in output
    (chunks,) = (shown(cell) for cell in executed if "for_html" in cell.source)
    assert chunks.count("forward passes") == 3
    assert 'class="chunk c1"' in chunks
    (sweep,) = (shown(cell) for cell in executed if "reference =" in cell.source)
    assert re.search(r"MARS, τ = 1</td><td>[\d.]+%</td><td>1\.00</td>", sweep)
    assert "MARS, τ = 0.5" in sweep
    assert any("image/png" in output.get("data", {}) for cell in executed for output in cell.get("outputs", ()))


def test_the_committed_outputs_are_of_these_cells_and_of_no_machine():
    notebook = nbformat.read(PATH, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(output.output_type not in ("error",) for cell in code for output in cell.outputs)
    assert PATH.stat().st_size < 1_000_000
    text = "\n".join(shown(cell) for cell in code)
    assert "tokens per forward" in text
    assert not re.search(r"/(root|home|Users|work|opt|usr)/|https?://", text)


def test_pip_may_not_replace_jax(monkeypatch, tmp_path):
    """The first cell, run where marsjax is missing: what pip is asked for, and what it must leave alone."""
    from importlib import metadata, util

    (cell,) = (cell for cell in nbformat.read(PATH, as_version=4).cells if "PACKAGE =" in cell.source)
    asked = []

    def run(command):
        asked.append(command)
        return type("Completed", (), {"returncode": 1})

    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="pip could not install marsjax beside"):
        exec(cell.source, {})
    (command,) = asked
    assert command[-1] == "marsjax"
    held = Path(command[command.index("-c") + 1]).read_text().splitlines()
    assert {f"{name}=={metadata.version(name)}" for name in ("jax", "jaxlib", "numpy")} <= set(held)
    monkeypatch.chdir(PATH.parent)
    with pytest.raises(RuntimeError):
        exec(cell.source, {})
    assert asked[-1][-1] == str(PATH.parents[1])


def test_the_settings_for_larger_models_are_settings():
    from marsjax.demo import assets
    from marsjax.training import load_config

    (cell,) = (cell for cell in nbformat.read(PATH, as_version=4).cells if "large = [" in cell.source)
    assigned = next(n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Assign))
    large = ast.literal_eval(assigned.value)
    config = load_config(assets() / "demo_mars.yaml", ["model.source=a/b", "output.directory=c", *large])
    assert config.objective.ar_weight == 1
    assert config.compute.remat
