"""Samples that a validation prints."""

from extras.watch.shown_samples import spread
from tests.test_validation import Scripted, on_episodes, on_rows


def test_some_answers_are_printed_without_their_middle(tmp_path, capsys):
    on_episodes(tmp_path, lambda text, times: "L", "trainer.log_val_generations=2").validate()
    printed = capsys.readouterr().out
    lines = printed.partition("2 of 2")[0].splitlines()[1:-2]  # of the first panel, without its borders
    assert len(lines) == 12 + 1 and lines[5][2:].startswith("… ") and "» L «" in printed  # the last line is its score
    assert "validation at step 1 · 1 of 2" in printed and "2 of 2" in printed and printed.count("more lines") == 2
    assert "score 0.00, end_reason max_turns" in printed and "P" in printed
    on_rows(tmp_path, Scripted(lambda text, times: "[bold]2"), "trainer.log_val_generations=1").validate()
    printed = capsys.readouterr().out
    assert "1+1=» [bold]2 «" in printed and "pred [bold]2" in printed and "1 of 1" in printed


def test_shown_samples_span_from_best_to_worst():
    scores = (0.0, 3.0, 1.0, 4.0, 2.0)
    assert [scores[place] for place in spread(scores, 3)] == [4.0, 2.0, 0.0]
    assert [scores[place] for place in spread(scores, 9)] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert [*spread([], 2)] == []
