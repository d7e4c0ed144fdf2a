from marsjax import cli
from marsjax.decoding import picture, plans


def test_picture_of_a_comb(capsys):
    assert cli.main(["plan-slots", "comb", "--k", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "comb: 9 slots (1 pending, 2 drafts, 6 masks), up to 3 tokens a forward"
    assert "draft 2 of the next step, if 1 of 2 were right" in lines[9]
    assert "■ ■ · · · ■ ■" in lines[9]


def test_pictures_of_the_others(capsys):
    assert "t+1, taken always" in picture.draw(plans.ar())
    drawn = picture.draw(plans.mars(3)).splitlines()
    assert drawn[3].split()[:3] == ["0", "pending", "t-2"]
    assert drawn[-1].endswith("t+3, taken while sure")
    assert "if 3 of 3 were right" in picture.draw(plans.chain(3))
    assert cli.main(["plan-slots", "comb", "--window", "2"]) == 1
    assert "window belongs to strategy mars" in capsys.readouterr().err
