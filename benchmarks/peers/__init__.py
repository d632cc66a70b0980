"""The speed of Mobula and of other trainers on the same work, side by side: `python -m benchmarks.peers`.

Every side is a script that runs in a separate process, in its trainer's environment (`make peers`, from the files
`NAME.txt` here), and prints one line of JSON (`step_clock.Run`). The sides of a work take turns, five rounds of A B
A B; a round is a whole run, of which the first steps are not counted. Both sides have the same two cores, two threads,
float32, the same checkpoint, prompts a step, samples a prompt, most tokens and optimizer steps. Works that learn report
the seconds of their steps, without evaluations, until the first weights of held-out accuracy 0.9, every 10 steps.

The long tail has text prompts: with several images a prompt the loss of TRL 1.16.0 fails in `get_rope_index` ("value
tensor of shape [3, 184] cannot be broadcast to indexing result of shape [3, 181]"); the cause is not known.
"""
