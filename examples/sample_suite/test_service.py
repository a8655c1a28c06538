"""A suite of your own: nothing here but tests, and the fixtures of Blink's pytest plugin.

    pytest examples/sample_suite --rig local --model SmolLM2-135M-Instruct --out out/mine

`pytest --rig local --fixtures` documents the fixtures, `--markers` the markers.
"""

import pytest

pytestmark = pytest.mark.capability("cpu", "shared-memory")


@pytest.mark.capability("http")
@pytest.mark.blink_property("repeatable-answers")
def test_greedy_answers_repeat(rig, client, record):
    """Catches: an answer that changes from call to call; usage counts that disagree."""
    ask = {"model": rig.model_name, "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    first, second = (client.completions.create(**ask) for _ in range(2))
    record.cases()
    assert first.choices[0].text == second.choices[0].text
    assert first.usage.completion_tokens == second.usage.completion_tokens <= 12


@pytest.mark.blink_property("ordered-delivery")
def test_drawn_programs(history):
    """Programs drawn by the test's own seed. Catches: events lost, repeated or out of order; a second end."""
    for program in history.draw(2):
        history.check(history(program))


@pytest.mark.blink_property("small-pool")
def test_a_pool_that_is_too_small(engine, history):
    """An engine of our own with so few pages that requests give way. Catches: one that is lost, pages that leak."""
    with engine.start(pages=34, max_rows=6, max_len=256, slots=16) as small:
        seen = history(history.draw(on=small)[0], on=small)
        history.check(seen, on=small)
        state = small.snapshot()
    # Two of the 34 belong to nobody; what is in the prefix cache without a user can be taken at once.
    assert len(state.free_list) + int(state.header["idle_cached"]) == 32


@pytest.mark.capability("http")
@pytest.mark.blink_property("freeze")
def test_frozen_front_end_pauses_only_its_own(rig, client, history, fault):
    """Catches: a frozen front end that holds up another ring's requests, or whose own stream does not go on."""
    ask = {"model": rig.model_name, "prompt": "1, 2, 3,", "max_tokens": 200, "temperature": 0}
    with client.completions.create(**ask, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        with fault("frontend-stop") as hit:
            history.check(history(history.draw()[0]))
        rest = list(stream)
    assert {request.ring for request in hit.requests} == {0}
    assert rest[-1].choices[0].finish_reason == "length"
