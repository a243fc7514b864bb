import pytest
import torch

from ringserve.engine.sampling.top_k import top_k


@pytest.mark.parametrize("num_columns", [1, 60, 64, 1000, 4096, 4133])
@pytest.mark.parametrize("k", [0, 1, 5, 16, 60])
@pytest.mark.parametrize("steps", [0.0, 0.5])  # many equal values
def test_the_largest_are_those_of_topk_with_their_columns(num_columns: int, k: int, steps: float) -> None:
    values = torch.randn(4, num_columns, generator=torch.Generator().manual_seed(k))
    values = (values / steps).round() * steps if steps else values
    values[1, : num_columns // 2] = float("-inf")
    k = min(k, num_columns)
    found, columns = top_k(values, k)
    assert found.equal(values.topk(k, dim=1).values)
    assert values.gather(1, columns).equal(found)
    assert all(len(set(row)) == k for row in columns.tolist())


def test_a_value_that_is_no_number_comes_first() -> None:
    values = torch.zeros(2, 4096)
    values[1, 77] = float("nan")
    assert top_k(values, 3)[1][1, 0] == 77
