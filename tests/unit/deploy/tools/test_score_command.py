"""`mobula score` and `mobula corrupt`: what they write, what they print, and what they refuse."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from score_data import SIX_ROWS, answer, options, record, write_jsonl
from typer.testing import CliRunner, Result

from mobula.deploy.cli import app
from mobula.deploy.tools import score as scoring
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions import BUILT_IN
from mobula.rewards.offline import evaluation
from mobula.rewards.offline.corruption import PATTERNS, corrupt, pattern_of
from mobula.rewards.offline.sources import jsonl
from mobula.rewards.offline.sources.jsonl import MIN_STRETCH_BYTES
from mobula.rewards.tools import Tools

PUBLISHED = ["--require-json", "--regex-pattern", r"^\{.*\}$", "--target-tokens", "32", "--latency-budget-ms", "400"]
PUBLISHED += ["--pass-threshold", "0.5", "--weight", "verifier=.45", "--weight", "cost=.05"]
HEAVY = ("torch", "ray", "vllm", "transformers", "deepspeed", "hydra", "pyarrow", "numpy", "jinja2")
RECIPE = """
components:
  - name: accuracy
    function: exact_match
    weight: 1.0
    options: {ignore_case: true, whole_response: false}
    service: reward
    needs_pictures: false
    retries: 0
    cache_entries: 0
  - name: shape
    function: format
    weight: 1.0
    options: {preset: boxed}
    service: reward
    needs_pictures: false
    retries: 0
    cache_entries: 0
recipes:
  default:
    components: [accuracy, shape]
    weights: {}
    gates: [{component: shape, needs: accuracy, at_least: 1.0}]
    normalise: true
accuracy_component: accuracy
"""


def mobula(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def six(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "six.jsonl", SIX_ROWS)


def test_the_published_figures_from_the_command_line(six: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "report.json"
    done = mobula("score", six, "--compat", "aerorl", *PUBLISHED, "--output", target, "--quiet")
    assert done.exit_code == 0
    printed = "6 records by aerorl: average 0.423333, pass rate 0.5; "
    printed += "the manual baseline passes 0.833333, 2 of them falsely"
    assert done.output.strip() == printed
    report = json.loads(target.read_text())
    assert report["semantics"] == "aerorl"
    means = {"verifier": 0.333333, "grounding": 0.333333, "format": 0.7, "cost": 0.666667}
    assert report["component_averages"] == means
    assert report["others"]["mobula"]["average_reward"] == 0.573333


def test_without_quiet_the_report_is_printed_after_its_headline(six: Path) -> None:
    lines = mobula("score", six, *PUBLISHED).output.splitlines()
    assert lines[0] == "=== Reward Summary ==="
    assert json.loads("\n".join(lines[1:-1]))["average_reward"] == 0.573333


def test_the_results_of_each_record_in_their_order(six: Path, tmp_path: Path) -> None:
    assert mobula("score", six, *PUBLISHED, "--quiet", "--results", tmp_path / "rows.jsonl").exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [row["id"] for row in SIX_ROWS]
    assert rows[1]["reward"]["aerorl"] == {
        "total_reward": 0.415,
        "components": {"verifier": 0.5, "grounding": 1.0, "format": -0.8, "cost": 1.0},
    }


def test_the_results_are_the_same_from_several_processes(tmp_path: Path) -> None:
    rows = [corrupt(f"row-{i}", "what?", f"thing {i % 7}") for i in range(2500)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert path.stat().st_size > 2 * MIN_STRETCH_BYTES
    for num in (1, 2):
        done = mobula("score", path, "--quiet", "--processes", num, "--results", tmp_path / f"{num}.jsonl")
        assert done.exit_code == 0
    found = (tmp_path / "1.jsonl").read_bytes()
    assert found == (tmp_path / "2.jsonl").read_bytes()
    assert [json.loads(line)["id"] for line in found.splitlines()] == [row["id"] for row in rows]


def test_progress_is_a_bar_on_a_terminal_and_nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "PROGRESS_PER_S", 1e9)  # every part is drawn
    path = write_jsonl(tmp_path / "rows.jsonl", [corrupt(f"row-{i}", "what?", f"thing {i % 7}") for i in range(2500)])
    printed = {}
    for is_terminal, is_quiet in ((True, False), (True, True), (False, False)):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
        not_given = dict.fromkeys(("recipe", "output", "html", "results"))
        how = {"num_processes": 2, "timeout_s": 60.0, "is_strict": False, "is_quiet": is_quiet}
        scoring.score(scoring.ScoreCommand(path, options(), is_compatible=False, **not_given, **how), console)
        printed[is_terminal, is_quiet] = console.file.getvalue()
    shares = [int(share) for share in re.findall(r"scoring rows.jsonl .*?(\d+)%", printed[True, False])]
    assert len(set(shares)) > 2 and shares == sorted(shares) and shares[-1] == 100
    assert "scoring" not in printed[True, True] + printed[False, False]


def test_a_recipe_scores_by_the_functions_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    rows = [
        record("both", r"\boxed{red}", "red"),
        record("plain", "red", "red"),
        record("wrong", r"\boxed{blue}", "red"),
        record("unknown", "red", None),
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    done = mobula("score", path, "--recipe", tmp_path / "recipe.yaml", "--quiet", "--output", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["semantics"] == "recipe"
    # totals 1, 1/2 and 0, of the weights 1 and 1 normalised; the gate keeps the third one's format from counting
    assert report["average_reward"] == 0.5
    assert report["unscored"] == {"accuracy: failed": 1}
    assert "4 records by recipe: average 0.5," in done.output
    assert "; 1 have no score: accuracy: failed (1)" in done.output
    assert report["component_averages"] == {"accuracy": 0.666667, "shape": 0.5}
    assert [example["id"] for example in report["best_examples"]] == ["both", "plain", "wrong"]
    assert set(report["others"]) == {"aerorl", "mobula"}
    assert report["differences"]["between"] == ["recipe", "mobula"]


LABELS_RECIPE = """
recipes:
  default: {components: [accuracy], weights: {}, gates: [], normalise: false}
  shaped: {components: [accuracy, shape], weights: {accuracy: 0.75, shape: 0.25}, gates: [], normalise: false}
accuracy_component: accuracy
"""


def test_weights_are_shown_by_label_where_records_have_labels(tmp_path: Path) -> None:
    components, _ = RECIPE.split("recipes:")
    (tmp_path / "recipe.yaml").write_text(components + LABELS_RECIPE)
    rows = [record("a", r"\boxed{red}", "red"), record("b", "red", "red", label="shaped")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = ["--recipe", tmp_path / "recipe.yaml", "--quiet", "--output", tmp_path / "r.json"]
    done = mobula("score", path, *words, "--html", tmp_path / "r.html")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["weights_by_label"] == {"default": {"accuracy": 1.0}, "shaped": {"accuracy": 0.75, "shape": 0.25}}
    page = (tmp_path / "r.html").read_text()
    assert "0.75 <small>shaped</small>" in page and "1 <small>default</small>" in page


PICTURES_RECIPE = """
components:
  - {name: seen, function: FILE, weight: 1.0, options: {}, service: reward, needs_pictures: true, retries: 0,
     cache_entries: 0}
accuracy_component: seen
processes: 2
"""
PLUGIN = """
import os, time

def score(request):
    if request.response.text == "hang":
        time.sleep(1000)
    if request.response.text.startswith("meet"):  # only two processes side by side can
        open(request.metadata["folder"] + "/" + request.response.text, "w").close()
        while len([name for name in os.listdir(request.metadata["folder"]) if name.startswith("meet")]) < 2:
            time.sleep(0.01)
    sizes = [len(picture) for picture in request.prompt_pictures]
    return sum(sizes) + 1000 * len(request.response.pictures)
"""


def test_a_recipe_sees_the_pictures_of_records_and_what_hangs_is_counted(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "recipe.yaml").write_text(PICTURES_RECIPE.replace("FILE", f'"{tmp_path}/plugin.py:score"'))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"12345")
    metadata = {"folder": str(tmp_path)}
    rows = [
        {"id": "path", "response": "x", "image": "pictures/a.png"},
        {"id": "two", "response": "x", "images": [str(tmp_path / "pictures/a.png"), "data:image/png;base64,QUJD"]},
        {"id": "drawn", "response": "x", "response_images": ["pictures/a.png"]},
        {"id": "clip", "response": "x", "videos": [["pictures/a.png", "pictures/a.png"]], "image": "pictures/a.png"},
        {"id": "frames", "response": "x", "video": {"frames": ["pictures/a.png"], "fps": 4}},
        {"id": "film", "response": "x", "video": "pictures/a.mp4"},
        {"id": "none", "response": "x"},
        {"id": "gone", "response": "x", "image": "pictures/b.png"},
        {"id": "no URL", "response": "x", "image": "data:,A"},
        {"id": "m1", "response": "meet 1", "metadata": metadata},
        {"id": "m2", "response": "meet 2", "metadata": metadata},
        {"id": "hangs", "response": "hang"},
    ]
    words = ["--recipe", tmp_path / "recipe.yaml", "--quiet", "--timeout", 60, "--processes", 1]
    clip = [{"bytes": b"12", "path": "0.png"}, {"bytes": b"123", "path": "1.png"}]
    held = [{"response": "x", "image": {"bytes": b"1234567", "path": "c.png"}, "videos": [clip]}]
    pq.write_table(pa.Table.from_pylist(held), tmp_path / "r.parquet")
    expected = {
        "path": 5.0,
        "two": 8.0,
        "drawn": 1000.0,
        "clip": 15.0,
        "frames": 5.0,
        "none": 0.0,
        "m1": 0.0,
        "m2": 0.0,
    }
    for path, found in ((write_jsonl(tmp_path / "rows.jsonl", rows), expected), (tmp_path / "r.parquet", {None: 12.0})):
        done = mobula("score", path, *words, "--output", tmp_path / "r.json", "--results", tmp_path / "r.jsonl")
        assert done.exit_code == 0, done.output
        results = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
        totals = {row["id"]: row["reward"]["recipe"].get("total_reward") for row in results}
        assert {name: total for name, total in totals.items() if total is not None} == found
        unscored = {"pictures: failed": 3, "seen: timed_out": 1} if len(found) > 1 else {}
        assert json.loads((tmp_path / "r.json").read_text())["unscored"] == unscored


MODEL_RECIPE = """
components:
  - {name: model, function: model, weight: 1.0, options: {}, service: reward, needs_pictures: false, retries: 0,
     cache_entries: 0}
accuracy_component: model
"""


class Model:
    """Computes in this process, returns its id as the score, and hangs over one text."""

    def __init__(self, tools: Tools) -> None:
        self._in_time = tools.in_time

    def __call__(self, request: RewardRequest) -> Score:
        hang_s = 30.0 * (request.response.text == "hang")
        self._in_time.call(lambda: time.sleep(hang_s), "the model")
        return Score(float(os.getpid()))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_that_hangs_costs_its_record_and_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setitem(BUILT_IN, "model", f"{__name__}:Model")
    monkeypatch.setattr(jsonl, "MIN_STRETCH_BYTES", 1000)
    (tmp_path / "recipe.yaml").write_text(MODEL_RECIPE)
    texts = ["1", "hang", "2", *["x" * 600] * 6]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"id": i, "response": text} for i, text in enumerate(texts)])
    words = ["--recipe", tmp_path / "recipe.yaml", "--quiet", "--timeout", 10, "--processes", processes]
    started = time.monotonic()
    done = mobula("score", path, *words, "--output", tmp_path / "r.json", "--results", tmp_path / "r.jsonl")
    assert done.exit_code == 0, done.output
    assert time.monotonic() - started < 20
    assert json.loads((tmp_path / "r.json").read_text())["unscored"] == {"model: timed_out": 1}
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    pids = [json.loads(line)["reward"]["recipe"].get("total_reward") for line in lines]
    assert [place for place, pid in enumerate(pids) if pid is None] == [1]
    assert pids[0] == pids[2], "the rest of its part is scored beside it"
    assert pids[0] not in pids[-4:], "another process has the parts that follow"
    assert os.getpid() not in pids


def test_a_slow_model_is_not_late_while_it_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "PIECE_RECORDS", 4)
    (tmp_path / "plugin.py").write_text("import time\n\ndef score(request):\n    time.sleep(0.1)\n    return 1.0\n")
    recipe = PICTURES_RECIPE.replace("FILE", f'"{tmp_path}/plugin.py:score"').replace("processes: 2", "processes: 1")
    (tmp_path / "recipe.yaml").write_text(recipe)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"id": i, "response": "x"} for i in range(40)])
    with path.open("a") as file:
        file.write("broken\n")
    words = ["--recipe", tmp_path / "recipe.yaml", "--quiet", "--timeout", 3, "--output", tmp_path / "r.json"]
    done = mobula("score", path, *words)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["unscored"], report["average_reward"]) == ({}, 1.0)
    assert report["input"]["broken"][0]["line"] == 41
    assert [example["record"] for example in report["worst_examples"]] == [38, 39, 40]


def test_a_trajectory_run_folder_that_holds_none_is_refused(tmp_path: Path) -> None:
    refused = mobula("score", tmp_path)
    assert refused.exit_code == 2
    assert "replay.trajectory_log=true" in refused.output


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--weight", "fluency=1"], "fluency"),
        (["--regex-pattern", "("], "regular expression"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml"),
        (["--strict"], "line 7: no JSON"),
        (["--output", "/proc/nothing/report.json"], "give another path"),
        (["--html", "/proc/nothing/report.html"], "give another path"),
        (["--results", "/proc/nothing/rows.jsonl"], "/proc/nothing/rows.jsonl cannot be written"),
        (["--results", "/proc"], "/proc cannot be written"),
        (["--latency-budget-ms", "nan"], "latency_budget_ms=nan"),
        (["--pass-threshold", "inf"], "pass_threshold=inf"),
    ],
)
def test_what_the_user_has_to_fix_is_one_message(six: Path, words: list[str], what: str) -> None:
    with six.open("a") as file:
        file.write("broken\n")
    refused = mobula("score", six, "--quiet", *words)
    assert refused.exit_code == 2
    assert what in refused.output
    assert "Traceback" not in refused.output


def test_a_pattern_that_backtracks_without_end_costs_its_timeout_even_on_a_small_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [record("a", "a" * 60 + "b", "x")])
    done = mobula("score", path, "--quiet", "--regex-pattern", "^(a+)+$", "--timeout", 1)
    assert done.exit_code == 1
    assert "no process finished within 1 s: bytes 0 to" in done.output


def test_scoring_jsonl_loads_nothing_heavy(six: Path) -> None:
    program = (
        "import json, sys\nfrom mobula.deploy.cli import app\n"
        f"try: app(['score', {str(six)!r}, '--quiet', '--processes', '2'])\nexcept SystemExit: pass\n"
        f"print('loaded', json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(child.stdout.rpartition("loaded ")[2]) == []


def test_the_page_shows_hostile_responses_as_text(tmp_path: Path) -> None:
    hostile = "</pre><script>alert(1)</script>{{ 7 * 7 }}"
    texts = (hostile, f"{hostile}\ud800")  # the second is no text, and a broken line
    rows = [*(record(text, text, text, [text], ["x"]) for text in texts), record(None, answer("a"), "a")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with path.open("a") as file:
        file.write('{"response": <script>}\n')
    assert mobula("score", path, "--quiet", "--html", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;{{ 7 * 7 }}" in page
    assert "<dt>broken lines</dt><dd>2</dd>" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_a_page_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    assert mobula("score", tmp_path / "none.jsonl", "--quiet", "--html", tmp_path / "page.html").exit_code == 0
    assert "There is no record to score" in (tmp_path / "page.html").read_text()


def test_the_patterns_of_the_corruption_by_their_published_shares() -> None:
    names = Counter(pattern_of(f"chartqa::{i % 3}:{i}").name for i in range(30_000))
    expected = {"good_json_exact": 58, "format_bad_contains": 14, "grounding_hidden": 12, "wrong_answer": 11}
    expected["verbose_slow"] = 5
    assert list(expected) == [pattern.name for pattern in PATTERNS]
    for name, percent in expected.items():
        assert 100 * names[name] / 30_000 == pytest.approx(percent, abs=1.0)
    # the first 24 bits of md5("a") are 0x0cc175 = 835957, of md5("q") 0x7694f4 = 7771380
    assert pattern_of("a").name == "good_json_exact"
    assert pattern_of("q").name == "grounding_hidden"


def test_each_pattern_has_its_flaw_and_its_latency() -> None:
    found = {}
    for i in range(200):
        made = corrupt(f"id-{i}", "p", " red ")
        found[made["metadata"].pop("pattern")] = made
    good = {"evidence_entities": ["red"], "claimed_entities": ["red"]}
    assert found["good_json_exact"]["metadata"] == {**good, "latency_ms": 110}
    assert found["good_json_exact"]["response"] == '{"answer": "red"}'
    assert found["format_bad_contains"]["response"] == "answer: red"
    assert found["format_bad_contains"]["metadata"]["latency_ms"] == 150
    assert found["grounding_hidden"]["metadata"]["claimed_entities"] == ["not-red"]
    assert found["grounding_hidden"]["metadata"]["latency_ms"] == 170
    assert found["wrong_answer"]["response"] == '{"answer": "wrong-red"}'
    assert found["wrong_answer"]["metadata"]["claimed_entities"] == ["wrong-red"]
    assert found["wrong_answer"]["metadata"]["latency_ms"] == 190
    assert json.loads(found["verbose_slow"]["response"])["answer"] == "red"
    assert len(json.loads(found["verbose_slow"]["response"])["reasoning"].split()) == 19
    assert found["verbose_slow"]["metadata"]["latency_ms"] == 1400


def test_corrupt_writes_what_score_reads_and_the_same_again(tmp_path: Path) -> None:
    rows = [{"id": f"q{i}", "question": "what?", "answer": 7.50} for i in range(300)] + [{"reference": ["a", "b"]}]
    source = write_jsonl(tmp_path / "data.jsonl", rows)
    for name in ("one.jsonl", "two.jsonl"):
        done = mobula("corrupt", source, tmp_path / name)
        assert done.exit_code == 0
        assert done.output.startswith("301 records written")
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    made = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert {row["reference"] for row in made} == {"7.5", "a"}
    assert made[-1]["id"] == "line-301"
    flawed = sum(row["metadata"]["pattern"] not in ("good_json_exact", "verbose_slow") for row in made)
    report = tmp_path / "report.json"
    assert mobula("score", tmp_path / "one.jsonl", *PUBLISHED, "--quiet", "--output", report).exit_code == 0
    caught = json.loads(report.read_text())["improvement"]["quality_gate_gain"]["false_pass_count"]
    assert caught == flawed


def test_corrupt_names_the_file_that_it_cannot_write(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "data.jsonl", [{"reference": "x"}])
    refused = mobula("corrupt", source, "/proc/nothing/out.jsonl")
    assert refused.exit_code == 2
    assert "/proc/nothing/out.jsonl cannot be written" in refused.output


def test_corrupt_refuses_a_row_without_a_reference(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "data.jsonl", [{"reference": "x"}, {"prompt": "y"}])
    refused = mobula("corrupt", source, tmp_path / "out.jsonl")
    assert refused.exit_code == 2
    assert "line 2: it has no reference" in refused.output
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
