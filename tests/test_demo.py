"""What the demo refuses; the demo itself is run by hand and in the notebook."""

import pytest
import yaml

from marsjax import demo as module
from marsjax.demo import demo
from marsjax.training import ConfigError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"problems": 0}, "problems=0 leaves nothing to decode; give at least 1"),
        ({"overrides": ["output.export=none"]}, "leave output.export=none"),
        ({"overrides": ["checkpoint.stop_after=3"]}, "checkpoint.stop_after out"),
    ],
)
def test_refused_before_work(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        demo(tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_quick_demo_is_not_gone_on_with_in_full(tmp_path, monkeypatch):
    def saved(config):
        (tmp_path / "training" / "checkpoints" / "40").mkdir(parents=True)
        (tmp_path / "training" / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "train", saved)
        with pytest.raises(KeyboardInterrupt):
            demo(tmp_path, quick=True)
    with pytest.raises(ConfigError, match=r"holds a demo of other settings than this demo has .*\(--out\), or delete"):
        demo(tmp_path)
