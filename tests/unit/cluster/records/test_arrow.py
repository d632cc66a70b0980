"""Groups as Arrow records and back: nothing is lost, and nothing but the prompt is written once instead of n times."""

import numpy as np
import pyarrow as pa
from fakes import make_group, make_prompt
from group_data import assert_equal, image_prompt

from mobula.cluster.records.arrow import SCHEMA, from_batch, record_batch, to_batch, to_rows
from mobula.cluster.records.trajectory import Reward

REWARDS = (Reward(0.75, {"accuracy": 1.0, "format": 0.5}, {"accuracy": "7 = 7"}), None)


def test_a_group_comes_back_as_it_was() -> None:
    group = make_group(image_prompt(), versions=(3, 3, 4, 5))
    back = from_batch(to_batch(group, REWARDS))
    assert_equal(back.group, group)
    assert (back.rewards, back.reference_logprobs) == (REWARDS, None)


def test_an_empty_response_comes_back() -> None:
    group = make_group(make_prompt("0/0/s0"), versions=())
    assert_equal(from_batch(to_batch(group, REWARDS)).group, group)


def test_the_prompt_is_written_once() -> None:
    batch = to_batch(make_group(image_prompt()), REWARDS)
    assert batch.schema == SCHEMA
    assert batch.column("expanded_ids").null_count == batch.num_rows - 1
    assert batch.column("token_ids").null_count == 0


def test_rows_become_the_very_bytes_that_they_become_column_by_column() -> None:
    logprobs = [np.full(3, -0.5, dtype=np.float32)] * 2
    of_group = to_rows(make_group(image_prompt()), REWARDS, logprobs, step=7)
    for rows in ([], of_group, [{"group_id": "0/0/s0", "reference_logprobs": logprobs[0]}]):
        expected = pa.RecordBatch.from_pylist(rows, SCHEMA)
        assert record_batch(rows).schema == SCHEMA
        assert record_batch(rows).serialize() == expected.serialize()


def test_what_was_read_does_not_hold_on_to_the_records_memory() -> None:
    back = from_batch(to_batch(make_group(image_prompt()), REWARDS))
    arrays = [back.group.prompt.expanded_ids, back.group.trajectories[0].actions.token_ids]
    assert all(array.flags.owndata and array.flags.writeable for array in arrays)
    assert arrays[0].dtype == np.int32
