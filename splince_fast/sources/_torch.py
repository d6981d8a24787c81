"""Rows of torch tensors and data loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from splince_fast._runtime.arguments import described_type, require
from splince_fast._runtime.rows import torch_to_numpy
from splince_fast.exceptions import InputError
from splince_fast.labels.names import listed
from splince_fast.sources._arrays import from_arrays
from splince_fast.sources.base import Block, Source, StreamSource, is_matrix, iterator_factory


def from_torch(
    data: object,
    labels: object = None,
    *,
    embedding: str | None = None,
    sample_weight: object = None,
    block_rows: int | None = None,
) -> Source:
    """Return a source of the rows of a tensor, or of the batches of a DataLoader.

    Blocks hold NumPy arrays: views of a CPU tensor, copies of other tensors. bfloat16 is converted
    to float32.

    Parameters
    ----------
    data : tensor of shape (n, d), DataLoader, or iterable of batches
        A batch is a tuple ``(X, label, ...)``, a mapping with X under the key `embedding`, or X.
    labels : mapping, frame or column; str or sequence of str for batches
        For a tensor: labels as in :func:`from_arrays`. For batches: the names of the entries that
        follow X in a tuple, or the keys of a mapping.
    embedding : str, optional
        Key of X in batches that are mappings.
    sample_weight : array of shape (n,); str for batches
        For a tensor: non-negative frequencies of the rows. For batches: the key of the weights in a
        mapping, or any name for weights in the last entry of a tuple.
    block_rows : int, optional
        Rows per block of a tensor; the default is as in :func:`from_arrays`. A batch is a block.

    Returns
    -------
    Source
        Resuming a DataLoader reads and discards the earlier batches, and raises InputError if the
        loader shuffles.

    Raises
    ------
    MissingExtraError
        torch is not installed.
    InputError
        The arguments do not fit the data. During reading: a batch does not fit the arguments.

    Examples
    --------
    >>> import torch
    >>> from splince_fast import sources
    >>> batches = [(torch.ones(4, 2), torch.zeros(4)), (torch.ones(1, 2), torch.ones(1))]
    >>> [block.X.shape for block in sources.from_torch(batches, labels="z")]
    [(4, 2), (1, 2)]
    """
    torch = require("torch", "torch")
    if isinstance(data, torch.Tensor):
        if embedding is not None:
            raise InputError("embedding= is a key of batches, but data is a tensor; leave it out")
        return from_arrays(data, labels, sample_weight=sample_weight, block_rows=block_rows)
    if block_rows is not None:
        raise InputError(
            "block_rows= is for a tensor, but data are batches, each of which is a block; set the "
            "batch_size of the DataLoader, 4096 for instance"
        )
    keys = _BatchKeys.from_arguments(embedding, labels, sample_weight)
    name = f"{type(data).__name__} of batches"
    if not isinstance(data, Iterable) or is_matrix(data):
        raise InputError(
            f"data is {described_type(data)}, neither a tensor nor batches; pass a DataLoader, an "
            "iterable of batches, or sources.from_arrays(X, labels)"
        )
    items = iterator_factory(data, name)
    source_class = _ShuffledSource if _shuffles(data) else StreamSource
    return source_class(
        name,
        lambda: map(keys.to_block, enumerate(items())),
        n_rows=_count_rows(data),
        refills=not isinstance(data, list | tuple | torch.utils.data.DataLoader),
    )


class _BatchKeys(NamedTuple):
    """Keys of the embedding, the labels and the weights in a batch."""

    embedding: str | None
    labels: tuple[str, ...]
    sample_weight: str | None

    @classmethod
    def from_arguments(cls, embedding: str | None, labels: Any, sample_weight: Any) -> Self:
        """Return the keys; raise InputError unless those of labels and weights are strings."""
        several = isinstance(labels, Iterable) and not isinstance(labels, str | Mapping)
        names = tuple(labels) if several and not hasattr(labels, "shape") else (labels,)
        keys = cls(embedding, () if labels is None else names, sample_weight)
        for name in keys.entries():
            if not isinstance(name, str):
                raise InputError(
                    "labels= and sample_weight= of batches are names, not "
                    f"{described_type(name)}; pass labels=['gender'] for batches (X, gender)"
                )
        return keys

    def entries(self) -> tuple[str, ...]:
        """Return the keys of the labels and the weights."""
        return self.labels if self.sample_weight is None else (*self.labels, self.sample_weight)

    def to_block(self, numbered_batch: tuple[int, object]) -> Block:
        """Convert a pair (number, batch) to a block; the number of the batch is for messages."""
        number, batch = numbered_batch
        if isinstance(batch, Mapping):
            X, entries = self._from_mapping(batch, number)
        else:
            X, entries = self._from_tuple(batch, number)
        if hasattr(X, "detach"):
            X = torch_to_numpy(X)
        if not is_matrix(X):
            raise InputError(
                f"X of batch {number} has shape {tuple(getattr(X, 'shape', ()))}; it must be "
                "(n, d): wrap a Dataset of single samples in a DataLoader, flatten other axes with "
                "X.flatten(1)"
            )
        weight = None if self.sample_weight is None else entries[self.sample_weight]
        return Block(X, {name: entries[name] for name in self.labels} or None, weight)

    def _from_mapping(self, batch: Mapping[Any, Any], number: int) -> tuple[Any, Mapping[str, Any]]:
        """Return X, and a mapping with the labels and weights, of a batch that is a mapping."""
        if self.embedding is None:
            raise InputError(
                f"batch {number} is a mapping with the keys {listed(batch)}; pass the key of X as "
                "embedding="
            )
        for name in (self.embedding, *self.entries()):
            if name not in batch:
                raise InputError(
                    f"batch {number} has no key {name!r}; its keys are {listed(batch)}"
                )
        return batch[self.embedding], batch

    def _from_tuple(self, batch: object, number: int) -> tuple[Any, Mapping[str, Any]]:
        """Return X, and a mapping of labels and weights, of a tuple, a list, or X alone."""
        entries = batch if isinstance(batch, tuple | list) else (batch,)
        names = self.entries()
        if self.embedding is not None or len(entries) != 1 + len(names):
            expected = "a mapping" if self.embedding is not None else f"(X, {', '.join(names)})"
            raise InputError(
                f"batch {number} is {described_type(batch)} of {len(entries)}, where {expected} "
                "is expected; name the entries after X by labels=[...] and sample_weight=, or "
                "pass embedding= for mappings"
            )
        return entries[0], dict(zip(names, entries[1:], strict=True))


class _ShuffledSource(StreamSource):
    """Source of batches whose order changes from pass to pass, so that resuming is impossible."""

    def iter_from(self, first_block: int = 0) -> Iterator[Block]:
        """Yield all blocks; raise InputError unless `first_block` is 0."""
        if first_block:
            raise InputError(
                f"{self.name} shuffles, so resuming would count some rows twice and miss others; "
                "make the DataLoader with shuffle=False: the order does not change the result"
            )
        return super().iter_from()


def _shuffles(data: object) -> bool:
    """Return whether a DataLoader draws its rows at random."""
    utils = require("torch.utils.data", "torch")
    samplers = (
        getattr(data, "sampler", None),
        getattr(getattr(data, "batch_sampler", None), "sampler", None),
    )
    random = (utils.RandomSampler, utils.SubsetRandomSampler, utils.WeightedRandomSampler)
    return isinstance(data, utils.DataLoader) and any(isinstance(s, random) for s in samplers)


def _count_rows(data: object) -> int | None:
    """Return the number of rows of a DataLoader with standard batches and collation, or None."""
    utils = require("torch.utils.data", "torch")
    if not isinstance(data, utils.DataLoader) or data.collate_fn is not utils.default_collate:
        return None
    batches = data.batch_sampler
    if type(batches) is not utils.BatchSampler or not hasattr(batches.sampler, "__len__"):
        return None
    n = len(batches.sampler)
    return n - n % batches.batch_size if batches.drop_last else n
