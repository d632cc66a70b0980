"""The pages in a real browser: they draw, answer, load nothing from elsewhere and run no script but their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import ANSWER_S, CHROMIUM, Browser
from data_rows import encoded
from fakes import make_prompt
from http_servers import reward_app, serving
from metrics_data import fetch_value, make_group, write_run
from PIL import Image
from waiting import wait_until

from mobula.cluster.metrics.artifacts import ArtifactWriter
from mobula.cluster.records.trajectory import Answers, Generated, Response, Reward
from mobula.cluster.rollout.evaluation import ScoredPrompt
from mobula.cluster.rollout.response_logs import ContactSheets
from mobula.deploy.pages.report import write_report
from mobula.rewards.contract import Score

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome here: install one to look at the report"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    running = Browser()
    yield running
    running.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "digits-seed7"
    write_run(folder, num_steps=40)
    return write_report(folder).as_uri()


def test_every_curve_is_drawn_without_errors_and_without_the_network(browser: Browser, page: str) -> None:
    browser.open(page)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('.chart')].map(c => { const p = c.querySelector('canvas');"
        " const pixels = p.getContext('2d').getImageData(0, 0, p.width, p.height).data;"
        " let painted = 0; for (let i = 3; i < pixels.length; i += 4) painted += pixels[i] > 200;"
        " return [c.id, p.getBoundingClientRect().width, painted]; })"
    )
    assert len(sizes) >= 10
    assert all(width > 250 and painted > 500 for _, width, painted in sizes), sizes
    assert browser.evaluate("document.images.length") >= 24
    assert browser.evaluate("[...document.images].every(i => i.naturalWidth === 56)")
    assert browser.complaints == []
    assert browser.requests() == [page]


@pytest.mark.parametrize("is_dark", [False, True])
def test_it_looks_like_something_in_light_and_dark(browser: Browser, page: str, is_dark: bool) -> None:
    browser.open(page, is_dark=is_dark)
    image = browser.screenshot()
    assert image.shape == (1800, 1280, 3)
    assert (np.median(image) < 60) == is_dark
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 200
    spread = image.max(axis=2).astype(int) - image.min(axis=2)
    assert (spread > 80).sum() > 2000  # the curves' own colours


def image(level: int, side: int) -> bytes:
    """PNG of a square of one level on black, so that its brightness identifies what is drawn."""
    pixels = np.zeros((side, side, 3), dtype=np.uint8)
    pixels[side // 4 : -side // 4, side // 4 : -side // 4] = level
    return encoded(Image.fromarray(pixels))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that made images in two evaluations, darker before and brighter after, and videos in three steps."""
    folder = tmp_path_factory.mktemp("runs") / "glyphs"
    write_run(folder, num_steps=4)
    sheets = ContactSheets(folder / "evaluations", timeout_s=1)
    for version, level in ((0, 60), (2, 120), (4, 240)):
        prompts = [
            ScoredPrompt(
                prompt := make_prompt(f"test/{n}/write {n}"),
                [Reward(1.0)] * 2,
                Generated(None, None, Answers(prompt, (0, 1), (Response("", 1, False, (image(level, 16),)),) * 2)),
            )
            for n in range(8)
        ]
        sheets._write("held_out", version, prompts)
    writer = ArtifactWriter(folder / "artifacts", per_step=2, frame_rate=4, version=0, fetch=fetch_value, timeout_s=1.0)
    for step in (1, 2, 4):
        group = make_group("a", [0.25, 1.0])
        frames = tuple(image(40 * (n + 1), 64) for n in range(5))
        trajectories = tuple(replace(t, response=replace(t.response, images=frames)) for t in group.group.trajectories)
        writer.offer(step, [replace(group, group=replace(group.group, trajectories=trajectories))])
    return folder


def test_images_of_both_evaluations_stand_side_by_side(browser: Browser, drawn: Path) -> None:
    page = write_report(drawn).as_uri()
    browser.open(page)
    found = browser.evaluate(
        "[...document.querySelectorAll('img.sheet')].map(i => { const b = i.getBoundingClientRect();"
        " return [i.closest('figure').querySelector('figcaption').textContent, i.complete, i.naturalWidth,"
        " i.naturalHeight, Math.round(b.top), b.left, b.width, i.alt.split(': ')[1]]; })"
    )
    assert [row[0] for row in found] == ["Version 0", "Version 4"], "the first and the last"
    (_, *first), (_, *last) = found
    assert first[0] and first[1] >= 200 and first[1:4] == last[1:4], "equal sheets, at one height"
    assert first[4] + first[5] <= last[4] and min(first[5], last[5]) > 200
    assert first[6] == last[6] and first[6].count("write") == 8, "the same prompts in the same order"

    browser.evaluate("document.querySelector('img.sheet').scrollIntoView()")
    shot = browser.screenshot().astype(int).mean(axis=2)
    top = browser.evaluate("Math.round(document.querySelector('img.sheet').getBoundingClientRect().top)")
    halves = [shot[top + 8 : top + 28, int(row[4]) + 8 : int(row[4]) + 28].max() for row in (first, last)]
    assert halves[0] < 100 < 200 < halves[1], "darker before, brighter after"
    assert browser.complaints == [] and browser.requests() == [page]


def test_a_video_shows_its_first_frame_and_plays(browser: Browser, drawn: Path) -> None:
    browser.open(write_report(drawn).as_uri())
    videos = "[...document.querySelectorAll('video')]"
    assert browser.evaluate(f"{videos}.length") == 4, "two of the first step, two of the last"
    titles = browser.evaluate("[...document.querySelectorAll('#videos ~ .card h4')].map(h => h.textContent)")
    assert titles == ["Step 1", "Step 4"]
    assert browser.evaluate(f"{videos}.every(v => v.poster.startsWith('data:image/jpeg'))")
    wait_until(lambda: browser.evaluate(f"{videos}.every(v => v.readyState >= 2)"))
    sizes = browser.evaluate(f"{videos}.map(v => [v.videoWidth, v.videoHeight, v.duration])")
    assert sizes == [[64, 64, pytest.approx(1.25, abs=0.05)]] * 4
    browser.evaluate(f"{videos}[0].play() && 0")
    wait_until(lambda: browser.evaluate(f"{videos}[0].currentTime") > 0.1)
    assert browser.complaints == []


def test_a_video_that_was_changed_is_refused(drawn: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(drawn, tmp_path / "changed")
    (changed / "artifacts" / "step-000001" / "a-0.mp4").write_bytes(b"other")
    with pytest.raises(ValueError, match="put the file of the run back"):
        write_report(changed)


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_width_needs_sideways_scrolling(browser: Browser, page: str, width: int) -> None:
    browser.open(page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_text_has_the_contrast_that_reading_needs(browser: Browser, page: str) -> None:
    script = """(() => {
      const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
        return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
      const ground = e => { for (; e; e = e.parentElement) {
        const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(', 0)')) return c; } };
      const names = 'p, dt, dd, b, small, h1, h2, h3, span, button, td, th, summary, pre';
      const texts = [...document.querySelectorAll(names)];
      return Math.min(...texts.filter(e => e.textContent.trim() && !e.hidden && e.offsetParent).map(e => {
        const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05); }));
    })()"""
    for is_dark in (False, True):
        browser.open(page, is_dark=is_dark)
        assert browser.evaluate(script) >= 4.5


def test_the_pointer_and_the_arrow_keys_read_values_off_a_curve(browser: Browser, page: str) -> None:
    browser.open(page)
    x, y, width, height = browser.evaluate(
        "(({x, y, width, height}) => [x, y, width, height])"
        "(document.querySelector('#chart-accuracy .u-over').getBoundingClientRect())"
    )
    read = "[...document.querySelectorAll('#chart-accuracy .u-series:not(.edge) .u-value')].map(v => v.textContent)"
    browser.page.mouse.move(x + width / 2, y + height / 2)
    wait_until(lambda: browser.evaluate(read)[0] == "20")
    assert browser.evaluate(read)[2].count(" to ") == 1, "the interval of the held-out accuracy"
    browser.page.mouse.move(2, 2)
    wait_until(lambda: browser.evaluate(read)[1] == "–")
    browser.evaluate("document.querySelector('#chart-accuracy .plot').focus()")
    for key in ("Home", "ArrowRight"):
        browser.page.keyboard.press(key)
        browser.evaluate("new Promise(requestAnimationFrame)")
    wait_until(lambda: browser.evaluate(read)[0] == "1")


def test_dragging_zooms_and_a_double_click_shows_all_steps_again(browser: Browser, page: str) -> None:
    browser.open(page)
    x, y, width = browser.evaluate(
        "(({x, y, width}) => [x, y, width])(document.querySelector('#chart-kl .u-over').getBoundingClientRect())"
    )
    ticks = "document.querySelector('#chart-kl canvas').toDataURL()"
    whole = browser.evaluate(ticks)
    browser.page.mouse.move(x + width / 2, y + 9)
    browser.page.mouse.down()
    browser.page.mouse.move(x + 0.75 * width, y + 9)
    browser.page.mouse.up()
    wait_until(lambda: browser.evaluate(ticks) != whole)
    browser.page.mouse.dblclick(x + 9, y + 9)
    wait_until(lambda: browser.evaluate(ticks) == whole)
    assert browser.complaints == []


def shown(browser: Browser) -> list[list[str]]:
    return browser.evaluate(
        "[...document.querySelectorAll('.sample')].filter(s => s.offsetParent)"
        ".map(s => [s.dataset.kind, s.dataset.period])"
    )


def test_buttons_filter_good_and_bad_samples(browser: Browser, page: str) -> None:
    browser.open(page)
    assert len(shown(browser)) == 24
    browser.evaluate("document.querySelector('button[value=worst]').click()")
    assert {kind for kind, _ in shown(browser)} == {"worst"}
    browser.evaluate("document.querySelector('button[value=late]').click()")
    assert shown(browser) == [["worst", "late"]] * 4
    assert browser.evaluate("document.querySelector('button[value=worst]').getAttribute('aria-pressed')") == "true"
    assert browser.evaluate("document.getElementById('num-shown').textContent") == "4 samples"
    browser.evaluate("document.querySelectorAll('[data-filter] button[value=\"\"]').forEach(b => b.click())")
    assert len(shown(browser)) == 24
    assert browser.complaints == []


def test_an_address_with_a_filter_opens_filtered(browser: Browser, page: str) -> None:
    browser.open(f"{page}#kind=best&period=early")
    assert shown(browser) == [["best", "early"]] * 4


def test_a_script_in_an_answer_is_shown_and_never_run(browser: Browser, tmp_path: Path) -> None:
    hostile = "<script>window.owned = true</script><img src=x onerror='window.owned = true'>"
    write_run(tmp_path / "hostile", num_steps=3, response=hostile)
    browser.open(write_report(tmp_path / "hostile").as_uri())
    assert browser.evaluate("document.querySelector('.answer').textContent") == hostile
    assert browser.evaluate("window.owned === undefined")
    assert browser.complaints == []


def test_even_a_script_that_got_into_the_page_is_refused_by_its_policy(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.evaluate(
        "(s => { s.textContent = 'window.owned = true'; document.body.append(s); })(document.createElement('script'))"
    )
    assert browser.evaluate("window.owned === undefined")


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_run_that_ended_early_opens_without_errors(browser: Browser, tmp_path: Path, num_steps: int) -> None:
    write_run(tmp_path / "early", num_steps=num_steps, status="failed")
    browser.open(write_report(tmp_path / "early").as_uri())
    assert browser.evaluate("document.querySelector('.status').textContent") == "failed"
    assert browser.evaluate("document.querySelectorAll('.chart').length") == (1 if num_steps == 0 else 11)
    assert browser.complaints == []


def test_the_reward_server_s_page_describes_every_path_without_the_network(browser: Browser) -> None:
    with serving(reward_app(lambda request: Score(1.0), token="s3cret")) as running:
        browser.open(f"{running.url}/docs")
        shown = "[...document.querySelectorAll('.opblock-summary-path')].map(p => p.dataset.path)"
        wait_until(lambda: browser.evaluate(shown), ANSWER_S, lambda: "the page stays empty")
        assert set(browser.evaluate(shown)) == {"/score", "/lightrft", "/health", "/metrics"}
        assert browser.complaints == []
        assert all(url.startswith(running.url) for url in browser.requests()), browser.requests()
