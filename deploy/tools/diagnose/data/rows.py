"""Duplicates, train rows in the held-out split, labels and pictures of the data."""

from __future__ import annotations

from collections.abc import Sequence

from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import not_measured
from mobula.deploy.tools.diagnose.records.survey import DataSurvey, PicturedRow

DUPLICATES, LEAKS, LABELS, PICTURES = "duplicate_prompts", "held_out_leak", "label_distribution", "pictures"
MOST, MANY, SOME = 0.5, 0.1, 0.02
NUM_SHOWN = 5


def check_duplicates(material: Material) -> RunFinding:
    """Share of training rows with the question and the pictures of another row."""
    train = _data(material).train
    share = train.num_repeated / max(1, train.num_read)
    numbers = {"repeated_fraction": share, "num_rows": float(train.num_rows), "num_read": float(train.num_read)}
    measured = f"{share:.1%} of {train.num_read} training rows repeat the question and the pictures of another row"
    largest = sorted(train.rows.values(), key=len, reverse=True)[:NUM_SHOWN]
    equal = tuple(Evidence(f"{len(ids)} equal rows: {', '.join(ids[:4])}") for ids in largest if len(ids) > 1)
    evidence = (*equal, *_shown(train.repeated, "repeats an earlier row"))
    verdict = RunVerdict.WARNING if share >= MANY else RunVerdict.NOTICE if share >= SOME else RunVerdict.OK
    action = "" if verdict is RunVerdict.OK else "remove repeated rows from data.path"
    return RunFinding(DUPLICATES, verdict, measured, numbers, action, evidence)


def check_leaks(material: Material) -> RunFinding:
    """Share of held-out rows that are training rows, too."""
    data = _data(material)
    if data.held_out.num_read == 0:
        return not_measured(LEAKS, f"the split {data.held_out_name} has no readable row")
    leaked = data.leaked
    share = len(leaked) / data.held_out.num_read
    numbers = {"leaked_fraction": share, "num_held_out": float(data.held_out.num_read)}
    measured = (
        f"{share:.1%} of {data.held_out.num_read} rows of {data.held_out_name} are training rows, too (question and "
        f"pictures; {data.train.num_read} of {data.train.num_rows} training rows read)"
    )
    pngs = {row.sample_id: row.pngs for row in data.held_out.leaked}
    evidence = tuple(
        Evidence(f"{held_out} is {trained}", pngs=pngs.get(held_out, ())) for held_out, trained in leaked[:NUM_SHOWN]
    )
    verdict = RunVerdict.FAULT if share >= MANY else RunVerdict.WARNING if share >= SOME else RunVerdict.OK
    verdict = RunVerdict.NOTICE if leaked and verdict is RunVerdict.OK else verdict
    action = f"remove these rows from one of the splits: the accuracy on {data.held_out_name} counts memorised rows"
    return RunFinding(LEAKS, verdict, measured, numbers, action if leaked else "", evidence)


def check_label_distribution(material: Material) -> RunFinding:
    """Share of the most frequent label, and of held-out labels that no training row has."""
    data = _data(material)
    labels, num = data.train.labels, max(1, data.train.labels.total())
    [(most, count)] = labels.most_common(1) or [("", 0)]
    held_out = data.held_out.labels
    unknown = sum(n for label, n in held_out.items() if label not in labels) / max(1, held_out.total())
    numbers = {"largest_share": count / num, "num_labels": float(len(labels)), "unknown_held_out": unknown}
    measured = (
        f"{len(labels)} different labels in {num} training rows, the most frequent {most[:40]!r} in {count / num:.1%}; "
        f"{unknown:.1%} of the labels of {data.held_out_name} occur in no training row"
    )
    evidence = tuple(Evidence(f"{label[:80]!r}: {n}") for label, n in labels.most_common(NUM_SHOWN))
    if count / num >= 0.9:
        action = "nearly all labels are equal: check the column of the answer (data.columns.answer)"
        return RunFinding(LABELS, RunVerdict.WARNING, measured, numbers, action, evidence)
    return RunFinding(LABELS, RunVerdict.OK, measured, numbers, "", evidence)


def check_pictures(material: Material) -> RunFinding:
    """Share of blank pictures, and of rows whose pictures are those of another row."""
    train = _data(material).train
    if train.num_pictures == 0:
        return not_measured(PICTURES, "no training row has a picture")
    blank = train.num_blank / train.num_pictures
    shared = 1 - len(train.pictures) / max(1, train.pictures.total())
    numbers = {"blank_fraction": blank, "shared_fraction": shared, "num_pictures": float(train.num_pictures)}
    measured = (
        f"{blank:.1%} of {train.num_pictures} training pictures are blank; {shared:.1%} of the rows have the "
        "pictures of another row"
    )
    worst = max(blank, shared)
    if blank >= MANY or (shared >= MOST and len(train.texts) < len(train.pictures) * 2):
        verdict = RunVerdict.FAULT if worst >= MOST else RunVerdict.WARNING
        action = "check how the pictures of data.path were written: `mobula data inspect` shows them"
        evidence = (*_shown(train.blank, "is blank"), *_shown(train.shared, "has the pictures of an earlier row"))
        return RunFinding(PICTURES, verdict, measured, numbers, action, evidence)
    return RunFinding(PICTURES, RunVerdict.OK, measured, numbers)


def _shown(rows: Sequence[PicturedRow], what: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(f"{row.sample_id} {what}", pngs=row.pngs) for row in rows)


def _data(material: Material) -> DataSurvey:
    assert material.data is not None, "the registry asks for data first"
    return material.data
