"""Rows to prompts: equal to what Hugging Face's own processor makes, both token spaces in agreement, nothing twice."""

import json
import shutil
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor

from mobula.actors.datasets.media import EncodedFile, ImageError, WebFile
from mobula.actors.datasets.rows import Row, Turn
from mobula.actors.processors import modality
from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.errors import MediaError, PromptError
from mobula.cluster.records.media import MediaStore, ProcessedMedia
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.load import load_config
from mobula.configs.schema.data import DataConfig
from mobula.configs.schema.rollout import SamplerKind
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policies.tiny.writing import SPECIAL_TOKENS

MIN_PIXELS, MAX_PIXELS = 4 * 28 * 28, 24 * 28 * 28
Images = Callable[..., tuple[Path, ...]]
DIGITS = load_config(["experiment=digits"])


def data_config(**changes: object) -> DataConfig:
    least = {"prompt_suffix": "", "min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS, "max_prompt_tokens": 512}
    limits = {"max_image_bytes": 1_000_000, "max_decoded_pixels": 1_000_000, "media_cache_bytes": 10_000_000}
    return DIGITS.data.model_copy(update={**least, **limits, **changes})


SAMPLER = DIGITS.sampler.model_copy(
    update={"kind": SamplerKind.HUGGINGFACE, "max_tokens": 8, "max_model_len": 512, "max_images_per_prompt": 3}
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0))


def build(
    model: str, *, prompt_suffix: str = r" Answer in \boxed{}.", **changes: object
) -> tuple[ChatProcessor, MediaStore]:
    store = MediaStore(put=lambda medium: medium, max_bytes=100_000_000)
    data = data_config(**changes)
    return ChatProcessor(model, data, SAMPLER, store, keep_files=False, suffix=prompt_suffix), store


@pytest.fixture(scope="module")
def processor(model: str) -> ChatProcessor:
    return build(model)[0]


@pytest.fixture(scope="module")
def image_pad(model: str) -> int:
    return AutoProcessor.from_pretrained(model).image_token_id


@pytest.fixture
def images(tmp_path: Path) -> Images:
    """Image files of the given sizes; `seed` makes equal sizes differ."""

    def write(*sizes: tuple[int, int], seed: int = 0) -> tuple[Path, ...]:
        return tuple(save(tmp_path / f"{seed}_{i}.png", size, seed + i) for i, size in enumerate(sizes))

    return write


def save(path: Path, size: tuple[int, int], seed: int) -> Path:
    width, height = size
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def row(question: str, images: Sequence[Path] = ()) -> Row:
    return Row("r", question, "7", r"\boxed{7}", tuple(images))


def media_of(prompt: Prompt) -> list[ProcessedMedia]:
    return [handle.reference for handle in prompt.media]


def check_token_spaces(prompt: Prompt, image_pad: int) -> None:
    """The invariants between compact ids, expanded ids, spans and grids."""
    counts = [int(m.inputs["image_grid_thw"].prod()) // 4 for m in media_of(prompt)]
    assert [span.end - span.start for span in prompt.media_spans] == counts
    inside = np.zeros(prompt.num_tokens, dtype=bool)
    for span in prompt.media_spans:
        inside[span.start : span.end] = True
    assert np.array_equal(inside, prompt.expanded_ids == image_pad)
    assert inside.sum() == sum(counts)
    assert (prompt.compact_ids == image_pad).sum() == len(counts)
    assert np.array_equal(prompt.expanded_ids[~inside], prompt.compact_ids[prompt.compact_ids != image_pad])


TINY, SMALL, WIDE, BIG = (5, 3), (56, 56), (120, 33), (480, 380)


def test_files_travel_only_where_some_reward_looks_at_them_and_metadata_always(model: str, images: Images) -> None:
    paths = images((56, 56))
    row = Row("r", "<image>Which?", "7", "7", paths, {"label": "digits"})
    for keep_files, expected in ((True, (paths[0].read_bytes(),)), (False, ())):
        store = MediaStore(put=lambda medium: medium, max_bytes=100_000_000)
        prompt = ChatProcessor(model, data_config(), SAMPLER, store, keep_files=keep_files).prepare(row, "0/0/r")
        assert prompt.media[0].reference.files == expected
        sizes = [[56, 56]]  # of the file, and as the model sees it
        assert prompt.metadata == {"label": "digits", "image_sizes": sizes, "shown_image_sizes": sizes}


@pytest.mark.parametrize("sizes", [(), (SMALL,), (SMALL, WIDE), (SMALL, SMALL), (TINY,), (BIG,), (BIG, TINY, WIDE)])
def test_ids_and_tensors_equal_those_of_the_models_own_processor(
    model: str, processor: ChatProcessor, images: Images, sizes: tuple[tuple[int, int], ...]
) -> None:
    files = images(*sizes)
    prompt = processor.prepare(row("What" + "<image> is" * len(files) + "?", files), "0/0/r")
    oracle = AutoProcessor.from_pretrained(model, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    expected = oracle(text=[prompt.text], images=[Image.open(f) for f in files] or None, return_tensors="np")
    assert prompt.expanded_ids.tolist() == expected["input_ids"][0].tolist()
    if files:
        for name in ("pixel_values", "image_grid_thw"):
            ours = np.concatenate([m.inputs[name] for m in media_of(prompt)])
            assert ours.dtype == expected[name].dtype
            assert np.array_equal(ours, expected[name])


def test_images_stand_where_the_question_puts_them(processor: ChatProcessor, images: Images) -> None:
    prompt = processor.prepare(row("Is <image>more than\n <image> ?", images(SMALL, WIDE)), "p")
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert prompt.text == (
        f"<|im_start|>user\nIs {image}more than\n {image} ? Answer in \\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_system_prompt_is_a_turn_of_its_own(model: str) -> None:
    prompt = build(model, system_prompt="Be brief.", prompt_suffix="")[0].prepare(row("2+2?"), "p")
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>")


def test_turns_before_the_question_are_part_of_the_prompt_and_their_images_come_first(
    model: str, images: Images
) -> None:
    first, second = images((56, 56), (84, 56))
    history = (Turn("system", "Be brief."), Turn("user", "<image>Which?"), Turn("assistant", "A 7."))
    row = Row("r", "And<image>?", "8", "8", (first, EncodedFile(second.read_bytes(), "second")), history=history)
    processor, _ = build(model, system_prompt="Be kind.")
    prompt = processor.prepare(row, "0/0/r")
    turns = [("system", "Be brief."), ("user", "Which?"), ("assistant", "A 7."), ("user", "And")]
    assert [prompt.text.count(text) for _, text in turns] == [1, 1, 1, 1] and "Be kind." not in prompt.text
    places = [prompt.text.index(text) for _, text in turns]
    assert places == sorted(places)
    assert [span.end - span.start for span in prompt.media_spans] == [4, 6]
    assert prompt.media[1].source == "second"
    alone = build(model)[0].prepare(Row("r", "And<image>?", "8", "8", (second,)), "0/0/r")
    assert alone.media[0].key == prompt.media[1].key, "an image is one medium, as a file and as bytes"


def test_a_prompt_carries_ids_and_references(processor: ChatProcessor) -> None:
    prompt = processor.prepare(row("2+2?"), "3/1/r")
    assert (prompt.prompt_id, prompt.sample_id, prompt.references) == ("3/1/r", "r", ("7", r"\boxed{7}"))
    assert prompt.compact_ids.dtype == prompt.expanded_ids.dtype == np.int32


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 150)), max_size=3),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=4, max_size=4),
)
def test_any_text_and_images_make_a_consistent_prompt_or_are_refused(
    processor: ChatProcessor, image_pad: int, images: Images, sizes: list[tuple[int, int]], texts: list[str]
) -> None:
    files = images(*sizes)
    question = "<image>".join(texts[: len(files) + 1])
    # Hypothesis also draws the constants of the code under test, placeholders and special tokens among them.
    if question.count("<image>") != len(files) or any(token in question for token in SPECIAL_TOKENS):
        with pytest.raises(PromptError):
            processor.prepare(row(question, files), "p")
        return
    prompt = processor.prepare(row(question, files), "p")
    check_token_spaces(prompt, image_pad)
    assert processor.check(row(question, files)) == prompt.num_tokens


def test_an_image_in_two_prompts_is_decoded_and_stored_once(
    model: str, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Path] = []
    decode = modality.decode_image
    monkeypatch.setattr(
        modality, "decode_image", lambda c, path, limits: decoded.append(path) or decode(c, path, limits)
    )
    processor, store = build(model)
    (file,) = images(SMALL)
    copy = file.with_name("copy.png")
    copy.write_bytes(file.read_bytes())
    first = processor.prepare(row("<image>?", [file]), "0/0/r")
    second = processor.prepare(row("<image><image>!", [file, copy]), "0/1/s")
    assert decoded == [file]
    assert {handle.key for handle in (*first.media, *second.media)} == {first.media[0].key}
    assert store.num_bytes == store.num_bytes_unique == first.media[0].num_bytes


def test_a_changed_file_is_another_medium(processor: ChatProcessor, tmp_path: Path) -> None:
    keys = {
        processor.prepare(row("<image>?", [save(tmp_path / "a.png", SMALL, seed)]), "p").media[0].key for seed in (1, 2)
    }
    assert len(keys) == 2


def test_thumbnails_are_small_images(processor: ChatProcessor, images: Images) -> None:
    thumbnails = [
        Image.open(BytesIO(m.thumbnail))
        for m in media_of(processor.prepare(row("<image><image>", images(BIG, SMALL)), "p"))
    ]
    assert [(t.format, max(t.size)) for t in thumbnails] == [("PNG", 128), ("PNG", 56)]


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|vision_start|>", "<|im_end|>", "<|endoftext|>"])
def test_text_that_imitates_a_special_token_is_refused(processor: ChatProcessor, token: str) -> None:
    for use in (processor.check, lambda bad: processor.prepare(bad, "p")):
        with pytest.raises(PromptError, match="special token"):
            use(row(f"What is {token}?"))
    later = Row("r", "q", "a", "a", history=(Turn("assistant", token), Turn("user", "x")))
    for bad in (Row("r", "2+2?", "7", f"7{token}"), later):
        with pytest.raises(PromptError, match="special token"):
            processor.check(bad)
    with pytest.raises(PromptError, match="special token"):
        processor.encode_answer(f"7{token}")


def test_a_special_token_put_together_from_question_and_suffix_is_refused(model: str) -> None:
    with pytest.raises(PromptError, match="special token"):
        build(model, prompt_suffix="pad|>")[0].check(row("What is <|image_"))


@pytest.mark.parametrize("claim", [{"processor_class": "Qwen2_5_VLProcessor"}, {}], ids=["claimed", "unclaimed"])
def test_a_model_without_image_processor_is_refused(model: str, tmp_path: Path, claim: dict[str, str]) -> None:
    AutoProcessor.from_pretrained(model).tokenizer.save_pretrained(tmp_path)
    shutil.copy2(Path(model) / "config.json", tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("processor_class", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | claim))
    with pytest.raises(ValueError, match="policy.model=.*download it again"):
        build(str(tmp_path))


@pytest.mark.parametrize("lost", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_model_without_its_tokenizer_is_refused(model: str, tmp_path: Path, lost: list[str]) -> None:
    shutil.copytree(model, tmp_path, ignore=shutil.ignore_patterns(*lost), dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"policy\.model=.*'<\|image_pad\|>'.*download or write the checkpoint again"):
        build(str(tmp_path))


@pytest.mark.parametrize("content", ["", '{"a":', "{}", "[]"])
def test_a_damaged_tokenizer_is_a_mistake_that_names_the_model(model: str, tmp_path: Path, content: str) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"policy\.model=.*has no processor that loads .*download it again"):
        build(str(tmp_path))


@pytest.mark.parametrize("key", ["prompt_suffix", "system_prompt"])
@pytest.mark.parametrize("text", ["<image>", "<|im_end|>"])
def test_configured_text_with_placeholders_or_special_tokens_is_refused(model: str, key: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"data.{key}"):
        build(model, **{key: text})


def test_files_of_the_web_are_downloaded_for_the_prompt_and_not_for_the_check(
    model: str, images: Images, tmp_path: Path
) -> None:
    asked: list[str] = []

    def fetch(url: str) -> Path:
        asked.append(url)
        if url == "absent":
            raise ImageError("download_failed", "absent cannot be downloaded")
        return tmp_path / url

    images(SMALL, WIDE)
    local = row("<image> or <image>?", [tmp_path / "0_0.png", tmp_path / "0_1.png"])
    late = row("<image> or <image>?", [WebFile("0_0.png", fetch), WebFile("0_1.png", fetch)])
    processor = build(model)[0]
    length = processor.check(row("<image> or <image>?", [WebFile("absent", fetch)] * 2))
    assert length == len(processor.prepare(local, "p").compact_ids) and asked == []
    there, here = processor.prepare(late, "p"), processor.prepare(local, "p")
    assert set(asked) == {"0_0.png", "0_1.png"}
    assert [handle.key for handle in there.media] == [handle.key for handle in here.media]
    assert np.array_equal(there.expanded_ids, here.expanded_ids)
    with pytest.raises(ImageError, match="absent cannot be downloaded"):
        processor.prepare(row("<image>?", [WebFile("absent", fetch)]), "p")
    with pytest.raises(PromptError, match="data.max_prompt_tokens"):
        build(model, max_prompt_tokens=length - 1)[0].check(late)
    with pytest.raises(PromptError, match="sampler.max_images_per_prompt"):
        processor.check(row("<image>" * 4, [WebFile("0_0.png", fetch)] * 4))


def test_a_prompt_of_exactly_the_limit_passes_and_one_token_more_is_refused(model: str, images: Images) -> None:
    fits = row("<image>?", images(SMALL))
    length = build(model)[0].check(fits)
    assert build(model, max_prompt_tokens=length)[0].prepare(fits, "p").num_tokens == length
    processor, store = build(model, max_prompt_tokens=length - 1)
    for use in (processor.check, lambda long: processor.prepare(long, "p")):
        with pytest.raises(PromptError, match=f"data.max_prompt_tokens is {length - 1}"):
            use(fits)
    assert store.num_bytes_unique == 0  # refused before anything was decoded


def test_placeholders_that_do_not_match_the_images_are_refused(processor: ChatProcessor, images: Images) -> None:
    with pytest.raises(PromptError, match="2 images and its rendered text 1 placeholders"):
        processor.prepare(row("<image>?", images(SMALL, WIDE)), "p")


def test_unfit_images_are_refused_by_name(processor: ChatProcessor, images: Images, tmp_path: Path) -> None:
    stripe = images((1, 300))[0]
    text = tmp_path / "text.png"
    text.write_text("no image")
    for path, message in ((stripe, "aspect ratio"), (text, "no PNG"), (tmp_path / "absent.png", "missing")):
        with pytest.raises(MediaError, match=f"{path.name}.*{message}"):
            processor.check(row("<image>", [path]))
        with pytest.raises(MediaError, match=f"{path.name}.*{message}"):
            processor.prepare(row("<image>", [path]), "p")


def test_a_truncated_image_passes_the_header_check_and_is_refused_when_decoded(
    processor: ChatProcessor, images: Images
) -> None:
    (file,) = images(SMALL)
    file.write_bytes(file.read_bytes()[:2000])
    assert processor.check(row("<image>", [file])) > 0
    with pytest.raises(MediaError, match="corrupt"):
        processor.prepare(row("<image>", [file]), "p")


MEDIA_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")


def test_stop_pad_and_media_ids_are_those_of_the_checkpoint(model: str, processor: ChatProcessor) -> None:
    tokenizer = AutoProcessor.from_pretrained(model).tokenizer
    assert processor.eos_token_ids == tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert processor.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert set(processor.media_token_ids) == set(tokenizer.convert_tokens_to_ids(MEDIA_TOKENS))
    assert not set(processor.media_token_ids) & set(processor.eos_token_ids)


def test_without_a_generation_config_the_tokenizers_eos_stops(tmp_path: Path) -> None:
    folder = write_tiny_qwen2_5_vl(tmp_path, seed=0)
    (folder / "generation_config.json").unlink()
    processor, _ = build(str(folder))
    assert len(processor.eos_token_ids) == 1
    assert processor.encode_answer("7")[-1] == processor.eos_token_ids[0]


def test_equal_fingerprints_mean_that_two_processors_make_the_same(model: str, processor: ChatProcessor) -> None:
    assert build(model)[0].fingerprint == processor.fingerprint
    assert build(model, max_pixels=MAX_PIXELS * 2)[0].fingerprint != processor.fingerprint
