"""Partition: how parameters are cut into blocks, and what a partition says about itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from blockmean import Partition
from blockmean.blocks import By
from support.reference import blocks_of
from support.strategies import labels, partitions

# ---------------------------------------------------------------- sizes and labels


def test_sizes_give_contiguous_blocks_in_order() -> None:
    p = Partition.from_sizes([2, 5, 3])
    assert (p.num_blocks, p.num_entries, p.is_contiguous) == (3, 10, True)
    assert p.sizes.tolist() == [2, 5, 3]
    assert p.labels.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_sizes_and_labels_may_be_tensors_of_any_whole_dtype_and_are_copied(dtype: torch.dtype) -> None:
    sizes, numbers = torch.tensor([1, 2], dtype=dtype), torch.tensor([1, 0, 1], dtype=dtype)
    p, q = Partition.from_sizes(sizes), Partition.from_labels(numbers)
    sizes.fill_(9), numbers.fill_(0)
    assert (p.sizes.tolist(), q.sizes.tolist(), q.labels.tolist()) == ([1, 2], [1, 2], [1, 0, 1])
    assert p.sizes.dtype == q.labels.dtype == torch.int64


@given(labels())
def test_labels_give_the_size_of_every_block_and_are_kept(drawn: list[int]) -> None:
    p = Partition.from_labels(drawn)
    assert p.sizes.tolist() == [len(block) for block in blocks_of(drawn)]
    assert p.labels.tolist() == drawn
    assert p.num_entries == len(drawn)
    assert p.is_contiguous == (sorted(drawn) == drawn)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_sorted_labels_are_the_same_partition_as_sizes(sizes: list[int]) -> None:
    p = Partition.from_sizes(sizes)
    q = Partition.from_labels(p.labels)
    assert p == q and hash(p) == hash(q) and q.is_contiguous


def test_blocks_with_more_than_one_entry_are_listed() -> None:
    assert Partition.from_sizes([1, 3, 1, 2]).nonsingleton.tolist() == [1, 3]


# ---------------------------------------------------------------- cutting parameters


def paper_net() -> nn.Sequential:
    """The paper's small MNIST model, 322 parameters (its Table 1)."""
    layers: list[nn.Module] = []
    for channels in (1, 3, 3, 3):
        layers += [nn.Conv2d(channels, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, 10))


def biases_whole(by: str) -> Callable[[str, Tensor], str]:
    """The paper's cuts: one block for the biases of a layer."""
    return lambda name, tensor: by if tensor.ndim > 1 else "tensor"


@pytest.mark.parametrize(
    ("by", "blocks"),
    [
        ("tensor", 10),
        (biases_whole("unit"), 27),
        (biases_whole("kernel"), 45),
        ("unit", 44),
        ("kernel", 62),
        ("module", 5),
        ("all", 1),
        ("element", 322),
    ],
)
def test_the_papers_net_has_the_papers_numbers_of_blocks(by: By, blocks: int) -> None:
    net = paper_net()
    p = Partition.of(net, by=by)
    assert net(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    assert (p.num_entries, p.num_blocks, len(set(p.names))) == (322, blocks, blocks)
    assert p.is_contiguous


TENSORS = {"s": torch.zeros(()), "b": torch.zeros(4), "w": torch.zeros(3, 4), "k": torch.zeros(2, 3, 5, 5)}


@pytest.mark.parametrize(
    ("by", "sizes"),
    [
        ("tensor", [1, 4, 12, 150]),
        ("unit", [*[1] * 5, *[4] * 3, *[75] * 2]),
        ("kernel", [*[1] * 5, *[4] * 3, *[25] * 6]),
        ("module", [167]),
        ("all", [167]),
        ("element", [1] * 167),
        (lambda name, tensor: "unit" if name == "k" else "tensor", [1, 4, 12, 75, 75]),
        (lambda name, tensor: "element" if tensor.ndim < 2 else "kernel", [*[1] * 5, *[4] * 3, *[25] * 6]),
    ],
)
def test_every_way_to_cut_gives_the_sizes_it_says(by: object, sizes: list[int]) -> None:
    assert Partition.of(TENSORS, by=by).sizes.tolist() == sizes


def test_a_convolution_by_unit_has_one_block_per_output_channel() -> None:
    assert Partition.of(torch.zeros(32, 32, 3, 3), by="unit").sizes.tolist() == [288] * 32


def test_a_callable_may_return_labels_that_broadcast_to_the_tensor() -> None:
    columns = Partition.of({"w": torch.zeros(2, 3)}, by=lambda name, tensor: torch.arange(3))
    assert columns.labels.tolist() == [0, 1, 2, 0, 1, 2] and not columns.is_contiguous
    assert columns.names == ("w[0]", "w[1]", "w[2]")
    rows = Partition.of({"w": torch.zeros(2, 3)}, by=lambda name, tensor: torch.arange(2).view(2, 1))
    assert rows == Partition.of(torch.zeros(2, 3), by="unit")


def test_a_callable_may_mix_names_and_labels_and_each_tensor_keeps_its_own_blocks() -> None:
    def by(name: str, tensor: Tensor) -> str | Tensor:
        return torch.arange(2) if name == "w" else "module"

    pairs = [("a.b", torch.zeros(2)), ("w", torch.zeros(2, 2)), ("a.w", torch.zeros(1)), ("c.b", torch.zeros(1))]
    p = Partition.of(pairs, by=by)
    assert p.labels.tolist() == [0, 0, 1, 2, 1, 2, 0, 3]
    assert p.names == ("a", "w[0]", "w[1]", "c")


def test_modules_whose_tensors_stand_apart_become_interleaved_blocks() -> None:
    pairs = [("a.w", torch.zeros(2)), ("b.w", torch.zeros(1)), ("a.b", torch.zeros(1)), ("root", torch.zeros(1))]
    p = Partition.of(pairs, by="module")
    assert p.labels.tolist() == [0, 0, 1, 0, 2] and not p.is_contiguous
    assert p.names == ("a", "b", "(root)")


def test_a_module_called_all_is_not_merged_with_the_block_of_everything_else() -> None:
    pairs = [("all.w", torch.zeros(2)), ("x", torch.zeros(3)), ("y", torch.zeros(1))]
    p = Partition.of(pairs, by=lambda name, tensor: "module" if "." in name else "all")
    assert p.sizes.tolist() == [2, 4]


def test_tensors_pairs_mappings_and_modules_are_cut_alike() -> None:
    layer = nn.Linear(4, 3)
    expected = Partition.from_sizes([12, 3])
    for params in (
        layer,
        layer.parameters(),
        list(layer.parameters()),
        layer.named_parameters(),
        dict(layer.named_parameters()),
        layer.state_dict(),
    ):
        assert Partition.of(params) == expected
    assert Partition.of(layer.weight, by="unit") == Partition.from_sizes([4, 4, 4])


def test_names_come_from_parameters_and_unnamed_tensors_are_numbered_as_given() -> None:
    tensors = [torch.zeros(2), torch.zeros(0), torch.zeros(2, 1), torch.zeros(())]
    assert Partition.of(tensors, by="unit").names == ("param0[0]", "param0[1]", "param2[0]", "param2[1]", "param3")
    assert Partition.of({"k": torch.zeros(1, 2, 3)}, by="kernel").names == ("k[0,0]", "k[0,1]")
    assert Partition.from_sizes([1, 2]).names == ("0", "1")
    assert Partition.from_sizes([1, 2], names=["x", "y"]).names == ("x", "y")
    assert Partition.from_labels([1, 0], names=["x", "y"]).names == ("x", "y")


def test_empty_tensors_have_no_block() -> None:
    p = Partition.of([("none", torch.zeros(0, 3)), ("w", torch.zeros(2))], by="unit")
    assert (p.sizes.tolist(), p.names) == ([1, 1], ("w[0]", "w[1]"))


def test_tied_parameters_of_a_module_count_once() -> None:
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    assert Partition.of(tied).num_entries == 9


# ---------------------------------------------------------------- nesting


@given(partitions(), st.data())
def test_coarsening_merges_labels_and_is_refined_by_what_it_came_from(fine: Partition, data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 2), min_size=fine.num_blocks, max_size=fine.num_blocks))
    groups = [sorted(set(groups)).index(group) for group in groups]  # no holes
    coarse = fine.coarsen(groups)
    assert coarse.labels.tolist() == [groups[block] for block in fine.labels.tolist()]
    assert coarse == fine.coarsen(Partition.from_labels(groups))
    assert fine.refines(coarse)
    assert coarse.refines(fine) == (coarse.num_blocks == fine.num_blocks)


@given(labels(), st.data())
def test_refines_is_what_the_definition_says(drawn: list[int], data: st.DataObject) -> None:
    other = data.draw(st.permutations(drawn))
    p, q = Partition.from_labels(drawn), Partition.from_labels(other)
    inside = all(len({other[k] for k in block}) == 1 for block in blocks_of(drawn))
    assert p.refines(q) == inside
    assert p.refines(p)


@given(st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_refining_is_transitive(sizes: list[int]) -> None:
    fine = Partition.from_sizes(sizes)
    middle = fine.coarsen([0, 1, 1, 2])
    coarse = middle.coarsen([0, 0, 1])
    assert fine.refines(middle) and middle.refines(coarse) and fine.refines(coarse)


def test_partitions_of_different_numbers_of_entries_do_not_refine_each_other() -> None:
    assert not Partition.from_sizes([2, 1]).refines(Partition.from_sizes([2]))


def test_the_ways_to_cut_a_net_are_nested() -> None:
    chain = [Partition.of(paper_net(), by=by) for by in ("element", "kernel", "unit", "tensor", "module", "all")]
    assert all(a.refines(b) for i, a in enumerate(chain) for b in chain[i:])
    assert not any(b.refines(a) for i, a in enumerate(chain) for b in chain[i + 1 :])


def test_coarsening_takes_names() -> None:
    assert Partition.from_sizes([1, 2, 3]).coarsen([0, 1, 1], names=["x", "y"]).names == ("x", "y")
    assert Partition.from_sizes([1, 2, 3]).coarsen([0, 1, 0], names=["x", "y"]).names == ("x", "y")


# ---------------------------------------------------------------- identity and text


def test_equality_compares_the_assignment_and_never_the_names() -> None:
    p = Partition.from_sizes([1, 2], names=["x", "y"])
    assert p == p and p == Partition.from_sizes([1, 2])
    assert hash(p) == hash(Partition.from_sizes([1, 2]))
    assert p != Partition.from_sizes([2, 1]) and p != Partition.from_sizes([1, 2, 1])
    assert p != Partition.from_labels([1, 0, 1])
    assert Partition.from_labels([0, 1, 0, 1]) != Partition.from_labels([0, 1, 1, 0])
    assert p != "Partition" and len({p, Partition.from_sizes([1, 2])}) == 1


@given(partitions())
def test_pickle_and_deepcopy_keep_everything(p: Partition) -> None:
    p = Partition.from_labels(p.labels, names=[f"n{i}" for i in range(p.num_blocks)])
    p.block_sum(torch.zeros(p.num_entries))  # fills the caches, which must not be copied along
    for q in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p), copy.copy(p)):
        assert q == p and hash(q) == hash(p) and q.names == p.names and q.labels.tolist() == p.labels.tolist()


def test_repr_names_sizes_and_shortens_long_lists() -> None:
    assert repr(Partition.from_sizes([2, 5])) == "Partition(L=2, d=7, sizes=[2, 5])"
    assert repr(Partition.from_labels([0, 1, 0])) == "Partition(L=2, d=3, sizes=[2, 1], interleaved)"
    assert repr(Partition.from_sizes(list(range(1, 10)))) == "Partition(L=9, d=45, sizes=[1, 2, 3, 4, ..., 8, 9])"


def test_describe_is_a_table_of_blocks_parameters_and_shares() -> None:
    text = Partition.of([("a.w", torch.zeros(2, 3)), ("a.b", torch.zeros(2)), ("c", torch.zeros(992))], "module")
    assert text.describe().splitlines() == [
        "block   parameter            entries  share",
        "a       a.w [2, 3], a.b [2]        8   0.8%",
        "(root)  c [992]                  992  99.2%",
        "2 blocks, 1,000 entries",
    ]


def test_describe_stops_after_max_rows_and_needs_no_parameters() -> None:
    assert Partition.from_sizes([1000, 2, 3]).describe(max_rows=1).splitlines() == [
        "block  entries  share",
        "0        1,000  99.5%",
        "... and 2 more",
        "3 blocks, 1,005 entries",
    ]
