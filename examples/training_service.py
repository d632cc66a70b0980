# %% [markdown]
# Train an adapter on sums with a loop of your own: `mobula serve-training` has the engines and the learner, the
# official `tinker` client the loop. Each cell runs in a notebook or in a script. Start the service first:
#
#     mobula serve-training policy=smollm2 resources=laptop_in_turns learner=single learner.tokens_per_microbatch=2048 \
#         sampler.max_model_len=256 data.max_prompt_tokens=128 sampler.max_tokens=64 --port 8800 --folder runs/service

# %%
import os
import random

import tinker
from tinker import types

KEY = "tml-any-key-without-tenants"
URL = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8800")
NUM_TAUGHT, NUM_STEPS = (int(os.environ.get(name, default)) for name, default in (("TAUGHT", "12"), ("STEPS", "12")))
NUM_PROMPTS, NUM_SAMPLES = 8, 8

service = tinker.ServiceClient(base_url=URL, api_key=KEY)
[model, *_] = tinker.RestClient(base_url=URL, api_key=KEY).get_server_capabilities().result().supported_models
training = service.create_lora_training_client(str(model.model_name), rank=16, seed=0).result()
tokenizer = training.get_tokenizer()


def question(a: int, b: int) -> list[int]:
    return tokenizer.encode(f"Question: {a} + {b}?\nAnswer:")


sums = [(a, b) for a in range(10) for b in range(10)]
random.Random(0).shuffle(sums)
held_out, trained = sums[:20], sums[20:]
greedy = types.SamplingParams(max_tokens=4, temperature=0.0, stop=["\n"])
sampled = types.SamplingParams(max_tokens=4, temperature=1.0, stop=["\n"])


def integers(values: list[int]) -> types.TensorData:
    return types.TensorData(data=values, dtype="int64", shape=[len(values)])


def floats(values: list[float]) -> types.TensorData:
    return types.TensorData(data=values, dtype="float32", shape=[len(values)])


def is_right(tokens: list[int], a: int, b: int) -> bool:
    return str(tokenizer.decode(tokens)).strip() == str(a + b)


def accuracy() -> float:
    """Accuracy of greedy answers to sums that are not trained."""
    sampler = training.save_weights_and_get_sampling_client().result()
    answers = [sampler.sample(types.ModelInput.from_ints(question(*pair)), 1, greedy) for pair in held_out]
    right = [
        is_right(answer.result().sequences[0].tokens, *pair) for answer, pair in zip(answers, held_out, strict=True)
    ]
    return sum(right) / len(right)


print(f"accuracy before: {accuracy():.2f}")

# %% A few steps on right answers: the model learns the form.


def taught(a: int, b: int) -> types.Datum:
    prompt, answer = question(a, b), tokenizer.encode(f" {a + b}\n")
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": integers(tokens[1:]), "weights": floats(weights)},
    )


for step in range(NUM_TAUGHT):
    rows = [taught(*pair) for pair in random.Random(step).sample(trained, 16)]
    computed = training.forward_backward(rows, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=5e-4))
    print(f"taught step {step + 1}: loss {computed.result().metrics['loss:sum'] / len(rows):.3f}")
    stepped.result()
print(f"accuracy after the taught steps: {accuracy():.2f}")

# %% Reinforcement learning: the advantage of an answer is its reward less the mean of its siblings.


def credited(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    tokens, num_before = prompt + sequence.tokens, len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": integers(tokens[1:]),
            "logprobs": floats([0.0] * num_before + (sequence.logprobs or [])),
            "advantages": floats([0.0] * num_before + [advantage] * len(sequence.tokens)),
        },
    )


for step in range(NUM_STEPS):
    sampler = training.save_weights_and_get_sampling_client().result()
    pairs = random.Random(100 + step).sample(trained, NUM_PROMPTS)
    groups = [sampler.sample(types.ModelInput.from_ints(question(*pair)), NUM_SAMPLES, sampled) for pair in pairs]
    rows, rewards = [], []
    for group, pair in zip(groups, pairs, strict=True):
        sequences = group.result().sequences
        own = [float(is_right(sequence.tokens, *pair)) for sequence in sequences]
        mean = sum(own) / len(own)
        if len(set(own)) > 1:
            prompt = question(*pair)
            rows += [credited(prompt, s, reward - mean) for s, reward in zip(sequences, own, strict=True)]
        rewards += own
    print(f"step {step + 1}: mean reward {sum(rewards) / len(rewards):.3f}")
    if rows:
        computed = training.forward_backward(rows, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=3e-4)).result()
        computed.result()
print(f"accuracy after {NUM_STEPS} steps of reinforcement learning: {accuracy():.2f}")

# %% The state, to go on later, and the adapter in PEFT's format.
print(training.save_state("sums").result().path)
print(training.save_weights_external("sums").result().path)
