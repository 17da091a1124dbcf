"""Reuse probabilities: what is learned, and that it stays bounded."""

import numpy as np

from kvstore.costmodel import REUSE_PRIORS
from kvstore.reuse import Reuse


def chain(prompt: int, length: int = 8) -> list[bytes]:
    return [f"prompt {prompt} chunk {index}".encode().ljust(16) for index in range(length)]


def test_it_starts_from_the_priors() -> None:
    assert tuple(Reuse().probabilities(np.array([1, 2, 3]))) == REUSE_PRIORS


def test_prompts_that_never_repeat_are_recognised_within_twenty() -> None:
    reuse = Reuse()
    for prompt in range(20):
        reuse.use(chain(prompt))
    assert reuse.probabilities(np.array([1]))[0] < 0.015


def test_prompts_that_always_repeat_are_recognised() -> None:
    reuse = Reuse()
    for _ in range(50):
        for prompt in range(5):
            uses = reuse.use(chain(prompt))
    assert set(uses.tolist()) == {50}
    assert reuse.probabilities(np.array([1, 2, 3])).min() > 0.8


def test_a_chain_that_grows_counts_its_head_again_and_its_tail_once() -> None:
    reuse = Reuse()
    reuse.use(chain(0, 4))
    assert reuse.use(chain(0, 6)).tolist() == [2, 2, 2, 2, 1, 1]


def test_the_order_of_equal_requests_does_not_matter() -> None:
    first, second = Reuse(), Reuse()
    prompts = [0, 1, 2, 0, 1, 2, 3, 3, 4, 4, 4]
    for prompt in prompts:
        first.use(chain(prompt))
    for prompt in reversed(prompts):
        second.use(chain(prompt))
    uses = np.array([1, 2, 3])
    assert first.probabilities(uses).tolist() == second.probabilities(uses).tolist()


def test_it_is_bounded_and_a_key_used_again_is_kept() -> None:
    reuse = Reuse(keys_max=64)
    for prompt in range(1000):
        reuse.use(chain(prompt))
        assert reuse.use(chain(-1, 2)).tolist() == [prompt + 1] * 2
        assert len(reuse) <= 64
    reuse.use(chain(5000, 500))
    assert len(reuse) <= 64


def test_what_it_learned_long_ago_is_forgotten() -> None:
    reuse = Reuse()
    for prompt in range(2000):
        reuse.use(chain(prompt))
        reuse.use(chain(prompt))
    assert reuse.probabilities(np.array([1]))[0] > 0.9
    for prompt in range(2000, 10_000):
        reuse.use(chain(prompt))
    # Counted for ever, a fifth of these would have come back.
    assert reuse.probabilities(np.array([1]))[0] < 0.05
