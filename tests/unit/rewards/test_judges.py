"""Judges behind a server and in a vLLM engine: requests, verdicts, and that no reply becomes a made-up score."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import engine_judge
import pytest
from http_servers import CONNECTION, Reply, Scripted, serving
from reward_data import TOOLS
from tiny_checkpoints import encoded_image

from mobula.cluster.records.trajectory import Response
from mobula.configs.load import load_config
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure, evaluate_batch
from mobula.rewards.functions import build_function

pytestmark = pytest.mark.timeout(300)  # an engine may have to start

OPTIONS: dict[str, Any] = {
    **engine_judge.OF_ANY_JUDGE,
    "model": "judge-1",
    "system": "You grade.",
    "template": 'Q: {question}\nTruth: {references}\nA: {response}\nReply {"score": 1} to {"score": 5}.',
    "images": "none",
    "verdict": r"regex:Score: (?P<score>\S+)",
    "max_tokens": 64,
    "extra": {"seed": 7},
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


ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}
ENVIRONMENT |= dict.fromkeys(("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"), "1")
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("judge") / "model")


@pytest.fixture(scope="module")
def apart() -> Iterator[Call]:
    """Calls a function in one process of its own: an engine leaves its mark on torch and on the process group."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            yield lambda function, *args, **kwargs: process.submit(function, *args, **kwargs).result()


def engine_request(text: str, *images: bytes, drawn: tuple[bytes, ...] = ()) -> RewardRequest:
    return RewardRequest(Response(text, 1, False, drawn), (), {}, "What is it?", images)


@pytest.mark.slow
def test_a_batch_is_scored_and_each_flaw_costs_its_own_response(apart: Call, model: Path) -> None:
    one, two, three = (encoded_image(seed) for seed in (1, 2, 3))
    requests = [
        engine_request("four"),
        engine_request("x" * 3000, one),
        engine_request("noise", one),
        engine_request("noise", one, two, three),
        engine_request("noise", b"nothing"),
        engine_request("noise", one, two),
    ]
    found = apart(engine_judge.outcomes, model, requests)
    assert [isinstance(outcome, Score) for outcome in found] == [True, False, True, False, False, True]
    assert all(1 <= found[i].value <= 5 and found[i].reason == f"Score: {found[i].value:g}" for i in (0, 2, 5))
    reasons = [outcome.reason for outcome in found if isinstance(outcome, ScoringFailure)]
    assert "maximum context length is 512 tokens" in reasons[0]
    assert "At most 2 image(s)" in reasons[1]
    assert "image 1 of the prompt is no PNG" in reasons[2]
    alone = [apart(engine_judge.outcomes, model, [asked])[0] for asked in requests]
    assert [outcome for outcome in alone if isinstance(outcome, Score)] == [found[0], found[2], found[5]]


@pytest.mark.slow
def test_the_engine_sees_the_images_of_a_response(apart: Call, model: Path) -> None:
    drawn = {"images": "response", "template": "Rate it.", "extra": {}, "verdict": "last_line"}
    asked = [engine_request("", drawn=(encoded_image(seed),)) for seed in range(6)]
    replies = [outcome.reason for outcome in apart(engine_judge.outcomes, model, asked, **drawn)]
    assert len(set(replies)) > 1, "greedy replies differ by nothing but the image"
    frames = engine_request("", drawn=(encoded_image(0), encoded_image(1), encoded_image(2)))
    whole, cut = (apart(engine_judge.outcomes, model, [frames], **drawn, frame_stride=n)[0] for n in (1, 3))
    assert "At most 2 image(s)" in whole.reason
    assert cut.reason == replies[0], "of three frames the first is shown"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"extra": {"ignore_eos": True}}, "gave no score (nothing matches the verdict's expression; its reply was cut"),
        ({"extra": {"structured_outputs": {"regex": "Score: [7-9]"}}}, "is not between 1 and 5"),
        ({"extra": {"structured_outputs": {"choice": ["good"]}}}, "gave no score"),
    ],
)
def test_no_verdict_of_an_engine_is_a_failure_and_no_number(
    apart: Call, model: Path, options: Any, reason: str
) -> None:
    (found,) = apart(engine_judge.outcomes, model, [engine_request("four")], **options)
    assert isinstance(found, ScoringFailure) and found.kind is FailureKind.FAILED and reason in found.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"engine": {"dtype": "float32"}}, "options.engine has dtype, which the judge sets itself"),
        ({"engine": {"max_modl_len": 8}}, "'max_modl_len', which vLLM does not know (did you mean 'max_model_len'?)"),
        ({"extra": {"n": 2}}, "options.extra has n, which the judge sets itself"),
        ({"extra": {"top": 2}}, "does not fit vLLM's SamplingParams"),
        ({"extra": {"top_p": 2.0}}, "top_p must be in (0, 1]"),
        ({"template": "Grade {question}"}, "no {response}"),
        ({"minimum": 5}, "not below maximum"),
        ({"model": "/tmp/no-such-judge"}, "options.model='/tmp/no-such-judge' cannot be loaded"),
    ],
)
def test_unfit_options_are_refused_before_a_model_is_loaded(
    apart: Call, model: Path, options: dict[str, Any], match: str
) -> None:
    words = dict(options)
    assert match in apart(engine_judge.refusal, Path(words.pop("model", model)), **words)


@pytest.mark.slow
def test_a_checkpoint_without_its_weights_is_refused(apart: Call, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    found = apart(engine_judge.refusal, tmp_path / "empty")
    assert "cannot be loaded with options.engine (RuntimeError: Cannot find any model weights" in found, found


@pytest.mark.slow
def test_two_judges_of_one_checkpoint_share_its_engine_and_torch_stays_as_it_was(apart: Call, model: Path) -> None:
    is_shared, is_as_before, refused = apart(engine_judge.shared, model)
    assert is_shared and is_as_before
    assert "differs from" in refused and "give both the same" in refused


@pytest.mark.slow
def test_a_late_engine_costs_its_batch_and_is_counted_until_it_comes_back(apart: Call, model: Path) -> None:
    found, num_stuck, after = apart(engine_judge.late, model, [engine_request("four"), engine_request("five")])
    assert [outcome.kind for outcome in found] == [FailureKind.TIMED_OUT] * 2
    assert "2 replies of the judge" in found[0].reason and num_stuck == 1
    assert all(isinstance(outcome, Score) for outcome in after)


@pytest.mark.slow
def test_an_engine_that_fails_is_an_error_of_the_worker_and_of_no_response(apart: Call, model: Path) -> None:
    """The last test of the module: the engine is not used again."""
    first, second, travels = apart(engine_judge.lost, model, [engine_request("four")])
    assert "its engine failed: RuntimeError: an illegal memory access at" in first
    assert second == first and travels


def test_the_pool_is_asked_what_the_server_is_asked() -> None:
    words = ("experiment=sd3_5_ocr_grpo", "data.path=some/folder")
    served, pooled = (load_config([*words, f"rewards={name}"]) for name in ("unified_judge", "unified_judge_pool"))
    (server,), (pool,) = served.rewards.components, pooled.rewards.components
    same = ("system", "template", "images", "verdict", "minimum", "maximum", "max_tokens", "temperature", "extra")
    assert [server.options[name] for name in same] == [pool.options[name] for name in same]
    assert (pool.service, pooled.resources.reward_services["judge"].num_gpus) == ("judge", 1)
    assert not served.resources.reward_services
