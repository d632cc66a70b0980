"""The generative judge: what it is asked, how its verdict is read, and that no reply becomes a made-up score."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import pytest
from http_servers import CONNECTION, Reply, Scripted, serving
from reward_data import TOOLS
from tiny_reward_models import encoded_image

from mobula.cluster.records.trajectory import Response
from mobula.configs.load import load_config
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure, evaluate_batch
from mobula.rewards.functions import build_function

OPTIONS: dict[str, Any] = {
    "model": "judge-1",
    "system": "You grade.",
    "template": 'Q: {question}\nTruth: {references}\nA: {response}\nReply {"score": 1} to {"score": 5}.',
    "images": "none",
    "verdict": r"regex:Score: (?P<score>\S+)",
    "minimum": 1,
    "maximum": 5,
    "max_tokens": 64,
    "temperature": 0,
    "extra": {"seed": 7},
    "question_pattern": None,
    **CONNECTION,
    "max_attempts": 2,
}


def ask(urls: Sequence[str], requests: Sequence[RewardRequest], **options: Any) -> tuple[Outcome, ...]:
    return evaluate_batch(build_function("judge", {**OPTIONS, "urls": list(urls), **options}, TOOLS), requests)


def request(text: str, **fields: Any) -> RewardRequest:
    return RewardRequest(Response(text, 1, False, fields.pop("drawn", ())), ("yes", "ja"), {}, "is it?", **fields)


def verdict_reply(text: str | None, finish_reason: str = "stop") -> Reply:
    return Reply(body={"id": "x", "choices": [{"message": {"content": text}, "finish_reason": finish_reason}]})


def test_the_judge_is_asked_with_everything_put_in_once() -> None:
    server = Scripted(lambda *_: verdict_reply("Well. Score: 2. No: Score: 4"))
    with serving(server) as running:
        (found,) = ask([running.url], [request("{references} yes")])
    assert found == Score(4.0, "Well. Score: 2. No: Score: 4"), "the last verdict counts"
    assert server.bodies == [
        {
            "model": "judge-1",
            "max_tokens": 64,
            "temperature": 0.0,
            "seed": 7,
            "messages": [
                {"role": "system", "content": "You grade."},
                {
                    "role": "user",
                    "content": 'Q: is it?\nTruth: yes\nja\nA: {references} yes\nReply {"score": 1} to {"score": 5}.',
                },
            ],
        }
    ]


def test_a_video_is_judged_by_every_third_frame_and_a_rating_of_5_is_1() -> None:
    """By `rewards=unified_judge`."""
    config = load_config(["experiment=sd3_5_ocr_grpo", "data.path=some/folder", "rewards=unified_judge"]).rewards
    [component] = config.components
    frames = tuple(encoded_image(seed) for seed in range(7))
    asked = RewardRequest(Response("", 1, False, frames), (), {}, "a red cube")
    server = Scripted(lambda *_: verdict_reply("The cube is red.\nFinal Score: 4.5"))
    with serving(server) as running:
        options = {**component.options, "urls": [running.url], "frame_stride": 3}
        (found,) = evaluate_batch(build_function("judge", options, TOOLS), [asked])
    [message] = server.bodies[0]["messages"]
    *shown, text = message["content"]
    sent = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in shown]
    assert sent == list(frames[::3]) and "[a red cube]" in text["text"]
    assert isinstance(found, Score) and component.weight * found.value == pytest.approx(0.9)


def test_images_travel_as_data_urls() -> None:
    server = Scripted(lambda *_: verdict_reply("Score: 3"))
    asked = request("a", prompt_images=(encoded_image(1), encoded_image(2)), drawn=(encoded_image(3),))
    with serving(server) as running:
        for images in ("none", "prompt", "response", "both"):
            assert isinstance(ask([running.url], [asked], images=images)[0], Score)
        (broken,) = ask([running.url], [request("a", prompt_images=(b"nothing",))], images="prompt")
    assert isinstance(broken, ScoringFailure) and "image 1 of the prompt" in broken.reason
    sent = []
    for body in server.bodies:
        content = body["messages"][1]["content"]
        parts = content if isinstance(content, list) else []  # a text alone
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        assert all(url.startswith("data:image/png;base64,") for url in urls)
        sent.append([base64.b64decode(url.partition(",")[2]) for url in urls])
    one, two, three = (encoded_image(seed) for seed in (1, 2, 3))
    assert sent == [[], [one, two], [three], [one, two, three]]


@pytest.mark.parametrize(
    ("verdict", "reply", "score"),
    [
        (r"regex:Score: (?P<score>\S+)", "Score: 4.5", 4.5),
        ("json:score", '{"score": 2, "why": "short"}', 2.0),
        ("fenced_json:score", 'Thinking.\n```json\n{"score": "3"}\n```', 3.0),
        ("tags:score", "I say <score> 5 </score>.", 5.0),
        ("last_line", "It is fine.\n1", 1.0),
    ],
)
def test_a_verdict_is_found_where_the_option_names_it(verdict: str, reply: str, score: float) -> None:
    with serving(Scripted(lambda *_: verdict_reply(reply))) as running:
        (found,) = ask([running.url], [request("a")], verdict=verdict)
    assert isinstance(found, Score) and found.value == score


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (verdict_reply("I cannot tell."), "nothing matches the verdict's expression"),
        (verdict_reply("Score: high"), "'high' is no number"),
        (verdict_reply("Score: nan"), "'nan' is no number"),
        (verdict_reply("Score: 4/5"), "'4/5' is no number"),
        (verdict_reply("Score: 6"), "score 6 is not between 1 and 5"),
        (verdict_reply("Score: -1"), "score -1 is not between 1 and 5"),
        (verdict_reply(""), "gave no score"),
        (verdict_reply(None), "gave no score"),
        (verdict_reply("Let me think", "length"), "cut off at max_tokens"),
        (Reply(body={"choices": []}), "no chat completion: choices"),
        (Reply(body=b"<html>"), "no chat completion"),
        (Reply(400, b"prompt too long"), "refused with 400: prompt too long"),
        (Reply(500, b"engine dead"), "answered 500: engine dead"),
    ],
)
def test_no_verdict_is_a_failure_and_no_number(reply: Reply, reason: str) -> None:
    with serving(Scripted(lambda *_: reply)) as running:
        (found,) = ask([running.url], [request("a")])
    assert isinstance(found, ScoringFailure) and found.kind is FailureKind.FAILED and reason in found.reason


def test_one_bad_reply_costs_one_response_and_servers_share_the_rest() -> None:
    def answer(_: int, body: Any) -> Reply:
        return verdict_reply("no idea" if "A: bad" in body["messages"][1]["content"] else "Score: 5")

    first, second = Scripted(answer), Scripted(answer)
    with serving(first) as one, serving(second) as two:
        found = ask([one.url, two.url], [request(text) for text in ("a", "b", "bad", "c", "d", "e")])
    assert [outcome.value if isinstance(outcome, Score) else None for outcome in found] == [5, 5, None, 5, 5, 5]
    assert len(first.bodies) + len(second.bodies) == 6
    assert first.bodies and second.bodies, "how the six are split is a matter of who answers sooner"


def test_without_references_a_template_that_needs_them_has_no_score() -> None:
    server = Scripted(lambda *_: verdict_reply("Score: 5"))
    with serving(server) as running:
        (found,) = ask([running.url], [RewardRequest(Response("a", 1, False), (), {}, "is it?")])
    assert isinstance(found, ScoringFailure) and "the prompt has none" in found.reason
    assert server.bodies == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"template": "Grade {answer} {response}"}, r"has \{answer\}"),
        ({"template": "Grade {question}"}, r"no \{response\}"),
        ({"verdict": "regex:(?P<points>x)"}, r"no group \(\?P<score>"),
        ({"verdict": "regex:("}, "no regular expression"),
        ({"verdict": "guess"}, "no way to find a score"),
        ({"minimum": 5}, "not below maximum"),
        ({"extra": {"messages": []}}, "judge sets itself"),
        ({"images": "some"}, "options.images='some'"),
        ({"timeout": 3}, "no option 'timeout'"),
    ],
)
def test_unfit_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ask(["http://127.0.0.1:1/v1/chat/completions"], [], **options)
