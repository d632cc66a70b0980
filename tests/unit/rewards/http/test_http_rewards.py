"""The HTTP reward client against real servers, honest and otherwise; the reward service: replies, refusals, stops."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from data_rows import encoded
from http_servers import CONNECTION, Reply, Running, Scorer, Scripted, reward_app, serving
from PIL import Image
from ray_apart import free_port
from reward_data import TOOLS, values, values_or_kinds
from waiting import wait_until

from mobula.cluster.records.trajectory import Response
from mobula.cluster.serving import Address
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.http.client import Endpoints
from mobula.rewards.http.server import BusyError, RewardServer, ScorerThreads, make_app
from mobula.rewards.http.wire import LightrftBody
from mobula.rewards.images import without_markers

OPTIONS: dict[str, Any] = {"dialect": "mobula", "batch_size": 4, **CONNECTION, "max_attempts": 3}


def ask(urls: Sequence[str], requests: Sequence[RewardRequest], **options: Any) -> tuple[Outcome, ...]:
    return evaluate_batch(build_function("http", {**OPTIONS, "urls": list(urls), **options}, TOOLS), requests)


def requests(*texts: str, **fields: Any) -> list[RewardRequest]:
    return [RewardRequest(Response(text, 3, False), ("r",), fields, "say: ") for text in texts]


def length(request: RewardRequest) -> Outcome:
    """Scores by length; texts may ask for trouble."""
    if request.response.text == "unfit":
        return ScoringFailure(FailureKind.FAILED, "no reference")
    return Score(float(len(request.response.text)), "counted", {"chars": float(len(request.response.text))})


def echo(body: Any) -> dict[str, Any]:
    return {"outcomes": [{"status": "ok", "value": float(len(s["response"]))} for s in body["samples"]]}


@pytest.fixture(scope="module")
def honest() -> Iterator[str]:
    with serving(reward_app(length)) as server:
        yield server.url


def test_each_sample_gets_its_own_outcome_in_order(honest: str) -> None:
    outcomes = ask([f"{honest}/score"], requests("a", "unfit", "ccc", "dd", "eeeee", "ffffff", ""))
    assert outcomes[0] == Score(1.0, "counted", {"chars": 1.0})
    assert outcomes[1] == ScoringFailure(FailureKind.FAILED, "no reference")
    assert values([*outcomes[:1], *outcomes[2:]]) == [1, 3, 2, 5, 6, 0]


def test_everything_that_a_reward_may_look_at_arrives() -> None:
    seen: list[RewardRequest] = []

    def look(request: RewardRequest) -> Outcome:
        seen.append(request)
        return Score(0.5)

    asked = RewardRequest(
        Response("t\u00fc \U0001f600", 7, True, (b"generated", b"second")),
        ("a", "b"),
        {"n": 1, "deep": {"l": [1.5, None, "x"]}},
        "prompt",
        (b"\x89PNG one", b"two"),
    )
    with serving(reward_app(look)) as server:
        assert values(ask([f"{server.url}/score"], [asked])) == [0.5]
    assert seen == [asked]


def test_batches_keep_to_samples_and_bytes() -> None:
    server = Scripted(lambda _, body: Reply(body=echo(body)))
    texts = ["x" * 300] * 5 + ["y"] * 6
    with serving(server) as running:
        outcomes = ask([running.url], requests(*texts), max_request_bytes=1200)
    assert values(outcomes) == [300] * 5 + [1] * 6
    assert max(len(body["samples"]) for body in server.bodies) == 4
    assert max(len(json.dumps(body, separators=(",", ":"))) for body in server.bodies) <= 1200


def test_a_sample_above_the_limit_costs_only_itself(honest: str) -> None:
    outcomes = ask([f"{honest}/score"], requests("x" * 2000, "ok"), max_request_bytes=1000)
    assert values_or_kinds(outcomes[:1]) == ["failed"] and "max_request_bytes is 1000" in str(outcomes[0])
    assert values(outcomes[1:]) == [2.0]


def test_metadata_that_are_no_json_cost_only_their_sample(honest: str) -> None:
    outcomes = ask([f"{honest}/score"], [*requests("a", what={1, 2}), *requests("bb")])
    assert "metadata" in str(outcomes[0]) and values(outcomes[1:]) == [2.0]


def test_a_busy_server_is_asked_again() -> None:
    server = Scripted(lambda n, body: Reply(503) if n < 3 else Reply(body=echo(body)))
    with serving(server) as running:
        assert values(ask([running.url], requests("abc"))) == [3.0]
    assert len(server.bodies) == 3


def test_retry_after_is_honoured() -> None:
    times: list[float] = []

    def answer(number: int, body: Any) -> Reply:
        times.append(time.monotonic())
        return Reply(429, headers={"Retry-After": "1"}) if number == 1 else Reply(body=echo(body))

    with serving(Scripted(answer)) as running:
        assert values(ask([running.url], requests("abc"))) == [3.0]
    assert times[1] - times[0] >= 1.0


def test_attempts_come_to_an_end_and_no_failure_is_a_number() -> None:
    server = Scripted(lambda *_: Reply(500, b"out of memory"))
    with serving(server) as running:
        outcomes = ask([running.url], requests("abc", "d"))
    assert values_or_kinds(outcomes) == ["failed", "failed"] and "answered 500: out of memory" in str(outcomes[0])
    assert len(server.bodies) == 3
    dead = ask([f"http://127.0.0.1:{free_port()}/score"], requests("abc", "d"))
    assert values_or_kinds(dead) == ["failed", "failed"] and "cannot be reached" in str(dead[0])


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refusal_is_final(status: int) -> None:
    server = Scripted(lambda *_: Reply(status, b"go away"))
    with serving(server) as running:
        outcomes = ask([running.url], requests("a", "b"))
    assert values_or_kinds(outcomes) == ["failed", "failed"] and f"refused with {status}: go away" in str(outcomes[0])
    assert len(server.bodies) == 1


@pytest.mark.parametrize("status", [413, 422])
def test_a_refusal_that_is_one_samples_costs_only_that_sample(status: int) -> None:
    def answer(_: int, body: Any) -> Reply:
        is_bad = any(sample["response"] == "bad" for sample in body["samples"])
        return Reply(status, b"bad") if is_bad else Reply(body=echo(body))

    with serving(Scripted(answer)) as running:
        outcomes = ask([running.url], requests("a", "bb", "bad", "dddd"))
    assert values_or_kinds(outcomes[2:3]) == ["failed"]
    assert values([*outcomes[:2], outcomes[3]]) == [1, 2, 4]


def test_a_server_that_hangs_costs_its_deadline() -> None:
    with serving(Scripted(lambda *_: Reply(hang_s=60))) as running:
        started = time.monotonic()
        one_attempt = ask([running.url], requests("a"), timeout_s=0.3, max_attempts=1)
        in_all = ask([running.url], requests(*"abcdefgh"), batch_size=1, timeout_s=0.5, total_timeout_s=0.7)
        seconds = time.monotonic() - started
    assert values_or_kinds(one_attempt) == ["timed_out"] and "timeout_s" in str(one_attempt[0])
    assert values_or_kinds(in_all) == ["timed_out"] * 8
    assert seconds < 50, "bounded by 1.0 s and what a busy machine adds, not by the 60 s for which the server hangs"


LIES: dict[str, tuple[bytes | dict[str, Any], str, str]] = {
    "too few": ({"outcomes": [{"status": "ok", "value": 1.0}]}, "failed", "1 rewards for 2 samples"),
    "too many": ({"outcomes": [{"status": "ok", "value": 1.0}] * 3}, "failed", "3 rewards for 2 samples"),
    "no json": (b"<html>hello</html>", "failed", "something else than agreed"),
    "another schema": ({"scores": [1, 2]}, "failed", "outcomes"),
    "text": ({"outcomes": [{"status": "ok", "value": "1.0"}] * 2}, "failed", "outcomes.0.value"),
    "no value": ({"outcomes": [{"status": "ok"}] * 2}, "failed", "has no value"),
    "unknown status": ({"outcomes": [{"status": "fine", "value": 1.0}] * 2}, "failed", "outcomes.0.status"),
    "nan": (b'{"outcomes":[{"status":"ok","value":NaN},{"status":"ok","value":NaN}]}', "not_finite", "nan"),
    "infinite": (b'{"outcomes":[{"status":"ok","value":1e999},{"status":"ok","value":1e999}]}', "not_finite", "inf"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_no_score(lie: str) -> None:
    body, kind, message = LIES[lie]
    server = Scripted(lambda *_: Reply(body=body))
    with serving(server) as running:
        outcomes = ask([running.url], requests("a", "b"))
    assert values_or_kinds(outcomes) == [kind, kind] and message in str(outcomes[0])
    assert len(server.bodies) == 1, "a lie is not worth a second question"


def test_a_reply_without_end_is_cut_off() -> None:
    with serving(Scripted(lambda *_: Reply(body=b"x" * 100_000))) as running:
        outcomes = ask([running.url], requests("a"), max_reply_bytes=1000)
    assert values_or_kinds(outcomes) == ["failed"] and "max_reply_bytes=1000" in str(outcomes[0])


def test_no_more_requests_fly_than_are_allowed() -> None:
    server = Scripted(lambda _, body: Reply(body=echo(body), hang_s=0.02))
    with serving(server) as running:
        assert values(ask([running.url], requests(*"abcdefghijkl"), batch_size=1, max_concurrency=3)) == [1.0] * 12
    assert server.most_in_flight == 3


def test_load_is_shared_and_a_dying_server_costs_nothing() -> None:
    dies_at = 3
    dying = Scripted(lambda n, body: Reply(500) if n >= dies_at else Reply(body=echo(body)))
    healthy = Scripted(lambda _, body: Reply(body=echo(body)))
    with serving(dying) as first, serving(healthy) as second:
        outcomes = ask([first.url, second.url], requests(*"abcdefghijklmnop"), batch_size=1, max_concurrency=2)
    assert values(outcomes) == [1.0] * 16
    assert dies_at <= len(dying.bodies) <= dies_at + 3, "set aside after two failures, give or take what was in flight"
    assert len(healthy.bodies) >= 13


def test_the_token_travels_and_its_absence_is_named(
    honest: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    with serving(reward_app(length, token="s3cret")) as server:
        url = f"{server.url}/score"
        assert values(ask([url], requests("abc"), token_env="REWARD_TOKEN")) == [3.0]
        refused = ask([url], requests("abc"))
        assert values_or_kinds(refused) == ["failed"] and "401" in str(refused[0])
        monkeypatch.setenv("REWARD_TOKEN", "wr0ng")
        with caplog.at_level("DEBUG"):
            wrong = ask([url], requests("abc"), token_env="REWARD_TOKEN")
        assert values_or_kinds(wrong) == ["failed"] and "wr0ng" not in f"{wrong[0]!r} {caplog.text}"
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(ValueError, match="token_env='REWARD_TOKEN' is not set"):
        ask([f"{honest}/score"], requests("abc"), token_env="REWARD_TOKEN")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "urls"),
        ({"urls": ["reward:8000"]}, "whole URLs"),
        ({"urls": ["http://a/x", "http://a/x"]}, "twice"),
        ({"urls": ["http://user:s3cret@a/x"]}, "credentials for a: use options.token_env"),
        ({"dialect": "grpc"}, "use mobula, lightrft, lightrft_responses"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"timeout_s": 0}, "timeout_s got 0"),
        ({"total_timeout_s": 1}, "shorter than timeout_s"),
        ({"max_atempts": 3}, "did you mean 'max_attempts'"),
    ],
)
def test_unfit_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_function("http", {**OPTIONS, "urls": ["http://127.0.0.1:1/score"], **options}, TOOLS)
    assert build_function("http", {**OPTIONS, "urls": "http://127.0.0.1:1/score"}, TOOLS), "one URL may stand alone"


# LightRFT's protocol: columns of queries, prompts, references and images; numbers come back.


def test_lightrft_gets_one_query_a_sample_and_each_image_by_itself() -> None:
    red, blue = (encoded(Image.new("RGB", (4, 4), colour)) for colour in ("red", "blue"))
    server = Scripted(lambda _, body: Reply(body={"rewards": [0.25] * len(body["queries"])}))
    asked = [
        RewardRequest(Response("one", 1, False), ("r",), {}, "say: ", (red, blue)),
        RewardRequest(Response("two", 1, False), (), {}, "say: "),
    ]
    with serving(server) as running:
        assert values(ask([running.url], asked, dialect="lightrft")) == [0.25, 0.25]
    images = [[base64.b64decode(text) for text in row] for row in server.bodies[0].pop("images")]
    assert images == [[red, blue], []]
    assert server.bodies[0] == {
        "queries": ["say: one", "say: two"],
        "prompts": ["say: ", "say: "],
        "references": [["r"], []],
    }


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        pytest.param(Image.new("RGBA", (2, 2), (255, 0, 0, 0)), (255, 255, 255), id="RGBA"),
        pytest.param(Image.new("RGB", (2, 2), (0, 0, 255)).convert("P"), (0, 0, 255), id="P"),
        pytest.param(Image.fromarray(np.full((2, 2), 0x8000, np.uint16)), (127, 127, 127), id="I;16"),
    ],
)
def test_every_kind_of_image_arrives_as_it_looks(image: Image.Image, pixel: tuple[int, int, int]) -> None:
    server = Scripted(lambda _, body: Reply(body={"rewards": [1.0]}))
    asked = RewardRequest(Response("x", 1, False), (), {}, "", (encoded(image),))
    with serving(server) as running:
        assert values(ask([running.url], [asked], dialect="lightrft")) == [1.0]
    sent = Image.open(BytesIO(base64.b64decode(server.bodies[0]["images"][0][0])))
    assert (sent.mode, sent.getpixel((0, 0))) == ("RGB", pixel)


def test_a_broken_image_costs_only_its_sample() -> None:
    server = Scripted(lambda _, body: Reply(body={"rewards": [1.0] * len(body["queries"])}))
    broken = RewardRequest(Response("x", 1, False), (), {}, "", (b"no image",))
    with serving(server) as running:
        outcomes = ask([running.url], [broken, *requests("y")], dialect="lightrft")
    assert "image 1 of the prompt is no PNG" in str(outcomes[0]) and values(outcomes[1:]) == [1.0]


def test_rewards_of_lightrft_are_checked_one_by_one() -> None:
    rewards = b'{"rewards": [1, null, "0.5", NaN, true, 1%b, 0.5], "metrics": {}}' % (b"0" * 400)
    with serving(Scripted(lambda *_: Reply(body=rewards))) as running:
        outcomes = ask([running.url], requests(*"abcdefg"), dialect="lightrft", batch_size=7)
    assert values([outcomes[0], outcomes[6]]) == [1.0, 0.5]
    assert values_or_kinds(outcomes[1:6]) == ["failed", "failed", "not_finite", "failed", "not_finite"]


def test_both_dialects_get_the_same_from_our_server(honest: str) -> None:
    asked = requests("a", "unfit", "ccc", "dd", "ee")
    native = ask([f"{honest}/score"], asked)
    ways = (("score", "lightrft"), ("lightrft", "lightrft"), ("lightrft?queries=response", "lightrft_responses"))
    for route, dialect in ways:
        outcomes = ask([f"{honest}/{route}"], asked, dialect=dialect)
        assert [type(outcome) for outcome in outcomes] == [type(outcome) for outcome in native]
        assert values([outcomes[0], *outcomes[2:]]) == values([native[0], *native[2:]]) == [1, 3, 2, 2]
        assert "no reference" in str(outcomes[1])


def test_a_process_that_asked_ends_without_a_word(honest: str) -> None:
    code = (
        "import logging, sys; import test_http_rewards as t;"
        "logging.getLogger('asyncio').setLevel('ERROR');"  # in dev mode it warns of what took a busy machine long
        "print(t.values(t.ask([sys.argv[1]], t.requests('abc', 'd')))); ends = t.build_function("
        "'http', {**t.OPTIONS, 'urls': sys.argv[1]}, t.TOOLS); ends.score_batch(t.requests('x'))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-c", code, f"{honest}/score"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[3.0, 1.0]\n", "")


# Endpoints: who is asked, on a clock of the test's.


def test_the_least_busy_endpoint_is_asked() -> None:
    endpoints = Endpoints(["a", "b", "c"], max_failures=2, aside_s=10)
    taken = [endpoints.take() for _ in range(6)]
    assert [endpoint.url for endpoint in taken] == ["a", "b", "c", "a", "b", "c"]
    endpoints.succeeded(taken[1])
    endpoints.succeeded(taken[4])
    assert [endpoints.take().url for _ in range(3)] == ["b", "b", "a"]


def test_a_failing_endpoint_is_set_aside_and_tried_by_one_request() -> None:
    now = 0.0
    endpoints = Endpoints(["a", "b"], max_failures=2, aside_s=10, clock=lambda: now)
    for _ in range(2):
        a, b = endpoints.take(), endpoints.take()
        assert (a.url, b.url) == ("a", "b")
        endpoints.failed(a)
        endpoints.succeeded(b)
    assert [endpoints.take().url for _ in range(3)] == ["b"] * 3
    now = 10.0
    trial = endpoints.take()
    assert [trial.url, endpoints.take().url] == ["a", "b"], "one request tries it, the others stay away"
    endpoints.succeeded(trial)
    assert endpoints.take().url == "a"


SAMPLE = {"response": "abc", "num_tokens": 1}


def fetch(url: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """(status, parsed body, headers) of a GET, or of a POST if there is a body."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            status, content, found = response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        status, content, found = error.code, error.read(), error.headers
    is_json = found.get_content_type() == "application/json"
    names = {name.lower(): value for name, value in found.items()}
    return status, json.loads(content) if is_json else content.decode(), names


def health(server: Running) -> dict[str, Any]:
    return fetch(f"{server.url}/health")[1]


def look(request: RewardRequest) -> Outcome:
    """Scores by length; texts may ask for trouble."""
    match request.response.text:
        case "unfit":
            return ScoringFailure(FailureKind.FAILED, "no reference")
        case "late":
            return ScoringFailure(FailureKind.TIMED_OUT, "too late")
        case text:
            return Score(float(len(text)))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(reward_app(look, max_request_bytes=4000)) as running:
        yield running


def test_lightrft_is_answered_with_the_score_of_responses_alone(server: Running) -> None:
    body = {
        "queries": [
            "<|pad|><|im_start|>user\n<|image_pad|><|image_pad|>How many?<|im_end|>\n"
            "<|im_start|>assistant\n12<|im_end|>",
            "<pad><pad><s>Question</s>four</s><pad>",
        ],
        "prompts": ["<|im_start|>user\n<|image_pad|>How many?<|im_end|>\n<|im_start|>assistant\n", "<s>Question</s>"],
        "labels": ["ours to ignore"],
    }
    for route in ("score", "lightrft"):
        assert fetch(f"{server.url}/{route}", body)[:2] == (200, {"rewards": [2.0, 4.0]})
    responses = {"queries": ["12", "four<|im_end|>"], "prompts": body["prompts"]}
    assert fetch(f"{server.url}/lightrft?queries=response", responses)[:2] == (200, {"rewards": [2.0, 4.0]})


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"queries": ["p:ok", "p:unfit"]}, 422, "sample 1 failed: no reference"),
        ({"queries": ["p:late", "p:ok"]}, 504, "sample 0 timed_out"),
        ({"queries": ["ok", "p:ok"]}, 422, "sample 0: its query does not begin with its prompt"),
        ({"prompts": None}, 422, "does not begin with its prompt"),
        ({"prompts": ["p:"]}, 422, "prompts has 1 rows for 2 queries"),
        ({"images": [["####"], None]}, 422, "sample 0: an image is no base64"),
    ],
)
def test_lightrft_gets_an_error_where_it_cannot_get_a_number(
    server: Running, change: dict[str, Any], status: int, message: str
) -> None:
    body = {"queries": ["p:ok", "p:ok"], "prompts": ["p:", "p:"], **change}
    got, reply, _ = fetch(f"{server.url}/lightrft", body)
    assert got == status and message in reply["detail"]


def test_lightrft_images_and_references_come_in_every_form() -> None:
    body = LightrftBody(
        queries=["p1", "p2", "p3"],
        prompts=["p", "p", "p"],
        references=["a string", ["a", "b"], None],
        images=["YWJj", ["YQ==", "data:image/jpeg;base64,Yg=="], None],
    )
    found = body.requests("full")
    assert [request.references for request in found] == [("a string",), ("a", "b"), ()]
    assert [request.prompt_images for request in found] == [(b"abc",), (b"a", b"b"), ()]


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("<|im_start|>a <|im_end|>", "a "),
        ("<pad><pad>a</s><pad>", "a"),
        ("a <s>struck out</s> b", "a <s>struck out</s> b"),
        ("1 <|> 2 | x |> y", "1 <|> 2 | x |> y"),
        ("<start_of_turn>model\nyes<end_of_turn>", "model\nyes"),
    ],
)
def test_special_tokens_go_and_nothing_else(text: str, cleaned: str) -> None:
    assert without_markers(text) == cleaned


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"samples": [{**SAMPLE, "response": 1}]}, ["body", "mobula", "samples", 0, "response"]),
        ({"samples": [SAMPLE, {"response": "x"}]}, ["body", "mobula", "samples", 1, "num_tokens"]),
        ({"samples": [{**SAMPLE, "images": ["###"]}]}, ["body", "mobula", "samples", 0, "images", 0]),
        ({"samples": [{**SAMPLE, "referenes": []}]}, ["body", "mobula", "samples", 0, "referenes"]),
        ({"samples": []}, ["body", "mobula", "samples"]),
        ({"queries": "abc"}, ["body", "lightrft", "queries"]),
        (b"{", ["body", 1]),
    ],
)
def test_a_body_that_does_not_fit_is_refused_by_field(server: Running, body: Any, field: list[Any]) -> None:
    status, reply, _ = fetch(f"{server.url}/score", body)
    assert status == 422
    assert field in [detail["loc"] for detail in reply["detail"]]
    assert all(set(detail) == {"loc", "msg", "type"} for detail in reply["detail"]), "nothing is sent back"


def test_a_large_body_is_refused_unread(server: Running) -> None:
    status, reply, _ = fetch(f"{server.url}/score", b"x" * 200_000)
    assert status == 413 and "4000 are allowed" in reply["detail"]
    chunks = (b"x" * 1000 for _ in range(5))  # no length is announced
    headers = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/score", chunks, headers)
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(request, timeout=3)


def test_only_the_token_opens() -> None:
    with serving(reward_app(look, token="s3cret")) as running:
        for path, body in (("/score", {"samples": [SAMPLE]}), ("/lightrft", {"queries": ["x"]}), ("/metrics", None)):
            for headers in ({}, {"Authorization": "Bearer s3cres"}, {"Authorization": "s3cret"}):
                status, _, found = fetch(running.url + path, body, **headers)
                assert (status, found["www-authenticate"]) == (401, "Bearer")
        opened = fetch(f"{running.url}/score", {"samples": [SAMPLE]}, Authorization="Bearer s3cret")
        assert opened[0] == 200 and opened[1]["outcomes"][0]["value"] == 3.0
        assert fetch(f"{running.url}/health")[0] == 200


def test_what_happened_is_counted_and_described() -> None:
    with serving(reward_app(look, token="s3cret", max_request_bytes=4000)) as running:
        url, token = f"{running.url}/score", {"Authorization": "Bearer s3cret"}
        fetch(url, {"samples": [SAMPLE, {**SAMPLE, "response": "unfit"}, SAMPLE]}, **token)
        assert fetch(url, {"samples": [SAMPLE]})[0] == 401
        assert fetch(url, {"samples": []}, **token)[0] == 422
        assert fetch(url, b"x" * 5000, **token)[0] == 413
        lines = fetch(f"{running.url}/metrics", **token)[1].splitlines()
        assert 'mobula_rewards_samples_total{status="ok"} 2.0' in lines
        assert 'mobula_rewards_samples_total{status="failed"} 1.0' in lines
        for status in (200, 401, 413, 422):
            assert f'mobula_rewards_requests_total{{status="{status}"}} 1.0' in lines
        paths = fetch(f"{running.url}/openapi.json", **token)[1]["paths"]
        assert set(paths) == {"/score", "/lightrft", "/health", "/metrics"}
        assert fetch(f"{running.url}/docs", **token)[0] == 200


def test_a_full_server_returns_when_to_retry_and_a_stuck_one_is_unhealthy() -> None:
    release = threading.Event()

    def hang(request: RewardRequest) -> Outcome:
        release.wait(30)
        return Score(1.0)

    with serving(reward_app(hang, timeout_s=1.0, max_waiting=1)) as running:
        replies: list[tuple[int, Any, dict[str, str]]] = []
        askers = [
            threading.Thread(target=lambda: replies.append(fetch(f"{running.url}/score", {"samples": [SAMPLE] * 2})))
            for _ in range(4)
        ]
        try:
            states = ({"busy": 1, "waiting": 0}, {"busy": 1, "waiting": 1}, {}, {})
            for asker, state in zip(askers, states, strict=True):
                asker.start()
                wait_until(lambda state=state: state.items() <= health(running).items(), what=lambda: health(running))
            for asker in askers:
                asker.join(20)
            # One is scored and one waits, until both have timed out; the queue is full for the others.
            statuses = sorted(status for status, _, _ in replies)
            assert statuses == [200, 200, 503, 503]
            assert all(headers["retry-after"] == "1" for status, _, headers in replies if status == 503)
            late = [outcome["status"] for status, body, _ in replies if status == 200 for outcome in body["outcomes"]]
            assert late == ["timed_out"] * 4
            status, body, _ = fetch(f"{running.url}/health")
            assert (status, body["status"], body["stuck"]) == (503, "stuck", 1)
        finally:
            release.set()
        wait_until(lambda: health(running).items() >= {"status": "ok", "stuck": 0}.items())


def test_stopping_lets_what_is_in_flight_finish() -> None:
    entered = threading.Event()

    def slow(request: RewardRequest) -> Outcome:
        entered.set()
        time.sleep(0.5)
        return Score(1.0)

    scorer = Scorer(slow)
    running = Running(
        make_app(RewardServer(ScorerThreads([scorer], max_waiting=4), 5.0, 10_000), Address("127.0.0.1", 0, None))
    )
    replies: list[Any] = []
    asker = threading.Thread(target=lambda: replies.append(fetch(f"{running.url}/score", {"samples": [SAMPLE]})))
    asker.start()
    assert entered.wait(10)
    running.stop()
    asker.join(10)
    assert replies[0][0] == 200 and replies[0][1]["outcomes"][0]["value"] == 1.0
    assert scorer.is_closed
    with pytest.raises(urllib.error.URLError):
        fetch(f"{running.url}/health")


def test_a_request_that_was_given_up_is_not_scored() -> None:
    release, scored = threading.Event(), []

    def score(request: RewardRequest) -> Outcome:
        release.wait(30)
        scored.append(request.response.text)
        return Score(1.0)

    threads = ScorerThreads([Scorer(score)], max_waiting=2)
    requests = {text: LightrftBody(queries=[text]).requests("response") for text in ("first", "given up", "last", "x")}
    running = threads.submit(requests["first"], time.monotonic() + 60)
    wait_until(lambda: threads.num_busy)
    given_up = threads.submit(requests["given up"], time.monotonic() + 60)
    last = threads.submit(requests["last"], time.monotonic() + 60)
    with pytest.raises(BusyError):
        threads.submit(requests["x"], time.monotonic() + 60)
    assert given_up.cancel()
    release.set()
    assert [outcome for future in (running, last) for outcome in future.result(20)] == [Score(1.0), Score(1.0)]
    threads.close(10)
    assert scored == ["first", "last"]
