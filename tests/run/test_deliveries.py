"""Groups that are sealed in the order of their admission: how their rows are delivered changes no batch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.run.harness import Bench, contents, reward_of, row
from tests.strategies import Row

# Whether rewards come late, and in two orders the requests with their rows.
Delivery = tuple[bool, list[list[list[Row]]]]


@st.composite
def deliveries(draw: st.DrawFn) -> Delivery:
    """The rows of six groups of two trajectories of up to three steps, and two orders of delivering them."""
    late = draw(st.booleans())
    per_token = draw(st.booleans())
    all_rows: list[Row] = []
    for uid in "abcdef":
        for sample in range(2):
            count = draw(st.integers(1, 3))
            for step in range(count):
                response = range(draw(st.integers(1, 3)))
                reward = [float(step + token) for token in response] if per_token else sample + step / 2
                all_rows.append(row(uid, sample, step, last=step == count - 1, reward=reward, response=response))
    orders = []
    for _ in range(2):
        sent = draw(st.permutations(all_rows + draw(st.lists(st.sampled_from(all_rows), max_size=5))))
        cuts = sorted(draw(st.sets(st.integers(1, len(sent) - 1), max_size=8)))
        orders.append([sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)])
    return late, orders


@settings(max_examples=100, deadline=None)
@given(deliveries())
def test_in_order_of_admission_no_interleaving_repetition_or_splitting_changes_a_batch(drawn: Delivery) -> None:
    late, orders = drawn
    built = []
    for requests in orders:
        bench = Bench(seal_order="admission", train_batch_size=3)
        bench.begin(*"abcdef")
        for request in requests:
            if late:
                bench.submit(*(one | {"reward": None} for one in request))
                bench.run.set_rewards([reward_of(one) for one in request])
            else:
                bench.submit(*request)
        bench.make_batches()
        built.append([contents(bench.build_batch.batches[batch]) for batch in range(2)])
    assert built[0] == built[1]
    assert [[name.split("'")[1] for name, _ in batch["keys"]] for batch in built[0]] == [
        sorted(name.split("'")[1] for name, _ in batch["keys"]) for batch in built[0]
    ]
