"""The recipes of docs/coming_from.md against the packages that they translate."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import splince_fast as sf

Float = NDArray[np.float64]

# Well-conditioned rows of order 1 (condition number of the covariance below 10, d = 8): rounding
# of either side stays below 1e3 eps.
CLOSE = 1e-12


def rows(n: int = 600, d: int = 8) -> tuple[Float, NDArray[np.int64], Float]:
    """Rows, a binary concept, and a quantity, both associated with the rows."""
    rng = np.random.default_rng(0)
    z, age = rng.integers(0, 2, n), rng.normal(size=n)
    X = rng.normal(size=(n, d))
    X[:, 0] += 2 * z
    X[:, 1] += age
    return X, z, age


# --- concept-erasure ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package() -> Any:
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit")  # at its import
        return pytest.importorskip("concept_erasure")


def test_a_streamed_leace_fitter(package: Any) -> None:
    import torch

    X, z, _ = rows()
    fitter = package.LeaceFitter(X.shape[1], 1, dtype=torch.float64, shrinkage=False, svd_tol=1e-9)
    moments = sf.Moments()
    for part in np.array_split(np.arange(len(X)), 4):
        fitter.update(torch.from_numpy(X[part]), torch.from_numpy(z[part]))
        moments.update(X[part], {"z": z[part]})
    theirs, ours = fitter.eraser, sf.leace(moments, erase="z")
    there = theirs(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(ours(X), there, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(
        ours.left @ ours.right.T, (theirs.proj_left @ theirs.proj_right).numpy(), atol=CLOSE
    )
    np.testing.assert_allclose(ours.mean, theirs.bias.numpy(), atol=CLOSE)
    tensor = ours(torch.from_numpy(X).float())
    assert tensor.dtype is torch.float32
    assert np.abs(there - X).max() > 0.1  # either of them erases something


def test_one_call(package: Any) -> None:
    import torch

    X, z, _ = rows()
    theirs = package.LeaceEraser.fit(
        torch.from_numpy(X), torch.from_numpy(z), shrinkage=False, svd_tol=1e-9
    )
    clean, eraser = sf.erase(X, z)
    np.testing.assert_allclose(clean, theirs(torch.from_numpy(X)).numpy(), rtol=0, atol=CLOSE)
    np.testing.assert_array_equal(clean, eraser(X))


def test_the_orthogonal_method_is_sal(package: Any) -> None:
    import torch

    X, z, _ = rows()
    theirs = package.LeaceEraser.fit(
        torch.from_numpy(X), torch.from_numpy(z), method="orth", svd_tol=1e-9
    )
    ours = sf.sal(sf.Moments().update(X, {"z": z}), erase="z")
    np.testing.assert_allclose(ours(X), theirs(torch.from_numpy(X)).numpy(), rtol=0, atol=CLOSE)


# --- fairlearn ------------------------------------------------------------------------------------


def remover(alpha: float) -> Any:
    preprocessing = pytest.importorskip("fairlearn.preprocessing")
    return preprocessing.CorrelationRemover(sensitive_feature_ids=["age"], alpha=alpha)


def people() -> Any:
    pd = pytest.importorskip("pandas")
    X, _, age = rows()
    return pd.DataFrame(X, columns=list("abcdefgh")).assign(age=40 + 10 * age)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_correlation_remover(alpha: float) -> None:
    X = people()
    theirs = np.asarray(remover(alpha).fit_transform(X))
    eraser = sf.LEACE().fit(X, concept=X[["age"]].astype(float)).projection_
    ours = eraser.scaled(alpha)(X)
    np.testing.assert_allclose(ours[:, :-1], theirs, rtol=0, atol=CLOSE)
    if alpha == 1:
        constant = ours[:, -1]  # the column that fairlearn drops
        assert np.ptp(constant) < 1e-12 * np.abs(constant).max()
    if alpha > 0:
        assert np.abs(theirs - X.to_numpy()[:, :-1]).max() > 0.01


def test_without_the_sensitive_column_nothing_of_it_is_needed() -> None:
    X = people()
    others, age = X.drop(columns="age"), X[["age"]].astype(float)
    eraser = sf.LEACE().fit(others, concept=age)
    clean = eraser.transform(others)
    deviation = age.to_numpy()[:, 0] - age.to_numpy().mean()
    assert np.abs(deviation @ clean).max() < 1e-12 * np.abs(deviation).sum() * np.abs(clean).max()
    with pytest.raises(ValueError, match=r"age|features|columns|shape"):
        remover(1.0).fit(X).transform(others)


# --- scikit-learn, dask, INLP ---------------------------------------------------------------------


def test_dask_rows() -> None:
    pytest.importorskip("distributed")
    da = pytest.importorskip("dask.array")
    X, z, _ = rows()
    lazy = da.from_array(X, chunks=(150, -1))
    moments = sf.Moments.from_blocks(sf.sources.from_dask(lazy, {"z": z}))
    ours = sf.LEACE.from_moments(moments, erase="z")
    expected = sf.LEACE().fit(X, concept=z).transform(X)
    found = ours.transform(lazy)
    assert found.chunks == lazy.chunks
    np.testing.assert_allclose(found.compute(), expected, rtol=0, atol=CLOSE)
    with pytest.raises(sf.InputError, match="from_dask"):
        sf.LEACE().fit(lazy, concept=z)


def test_inlp_has_a_projection() -> None:
    X, z, _ = rows()
    eraser = sf.baselines.INLP().fit(X, concept=z).projection_
    assert eraser.rank >= 1
    np.testing.assert_allclose(eraser.matrix() @ eraser.matrix(), eraser.matrix(), atol=CLOSE)
