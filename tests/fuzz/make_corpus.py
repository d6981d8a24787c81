"""Write the first inputs of the corpora: small valid files and labels, and ones just beyond."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import numpy as np

from splince_fast import Folds, Moments, Projection, leace, oracle, quadratic, splince

HERE = Path(__file__).resolve().parent / "corpus"


def edited(data: bytes, old: str, new: str) -> bytes:
    """A file with `new` in its metadata where `old` and a number stood; its digest is left."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    fields = header["__metadata__"]
    fields["metadata"] = re.sub(re.escape(old) + r"[-+.\de]+", new, fields["metadata"], count=1)
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def main() -> None:
    for kind in ("moments", "projection", "conditional", "labels"):
        (HERE / kind).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    X, z = rng.normal(size=(9, 2)), np.arange(9) % 2
    named = {"z": z, "t": ["a", "b", None] * 3, "y": X[:, 0] + z, "s": X + 1}
    empty = Moments()
    labelled = Moments(block_rows=3, joint=[("z", "t")]).update(X, named)
    waiting = Moments(block_rows=4).update(X.astype(np.float32), {"y": named["y"]})
    weighted = Moments().update(X, {"z": z}, sample_weight=np.arange(9.0))
    every_kind = Moments(block_rows=8, joint=[("z", "t")], kinds={"z": "classes"})
    every_kind.update(X, named, sample_weight=np.arange(9) % 4 + 0.5)
    classes = Moments(by="t", block_rows=2).update(X, named)
    sampled = Moments(subsample=0.6, block_rows=8).update(X, named)
    for name, moments in {
        "empty": empty, "settled": labelled, "waiting": waiting, "weighted": weighted,
        "every-kind": every_kind, "classes": classes, "sampled": sampled,
    }.items():  # fmt: skip
        moments.save(HERE / "moments" / name)
    folds = Folds(2, groups="z", by="t", block_rows=2).update(X, named)
    folds._write_checkpoint(HERE / "moments" / "folds", {})
    whole = (HERE / "moments" / "settled").read_bytes()
    (HERE / "moments" / "truncated").write_bytes(whole[:-5])
    hand_made = Projection(np.ones((2, 1)), np.ones((2, 1)), np.ones(2))
    hand_made.save(HERE / "projection" / "hand-made")
    leace(weighted, erase="z").save(HERE / "projection" / "leace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        splince(labelled, erase="z", keep="y").save(HERE / "projection" / "splince")
    Projection(np.ones((2, 0)), np.ones((2, 0)), np.ones(2)).save(HERE / "projection" / "identity")
    full = Moments(by="z").update(X, {name: named[name] for name in ("z", "y", "s")})
    for name, options in (
        ("oracle", {}), ("strict", {"missing": "raise"}),
    ):  # fmt: skip
        oracle(full, erase="z", keep="y", **options).save(HERE / "conditional" / name)
    oracle(full, erase="s").save(HERE / "conditional" / "continuous")
    quadratic(full, erase="z", keep="y", shrinkage=0.5).save(HERE / "conditional" / "quadratic")
    whole = (HERE / "conditional" / "oracle").read_bytes()
    (HERE / "conditional" / "truncated").write_bytes(whole[:-5])
    whole = (HERE / "projection" / "leace").read_bytes()
    (HERE / "projection" / "truncated").write_bytes(whole[:-5])
    # Found by fuzzing: a number of the report that is infinite was loaded and could not be saved.
    (HERE / "projection" / "number-that-overflows").write_bytes(
        edited(whole, '"tolerance": ', '"tolerance": 1e9999')
    )
    settled = (HERE / "moments" / "settled").read_bytes()
    (HERE / "moments" / "rows-beyond-an-integer").write_bytes(
        edited(settled, '"n_rows": ', '"n_rows": 1000000000000000000000000000000')
    )
    for name, value in {
        "classes": [4, {"z": ["a", None, "b", "a"]}, {}, []],
        "numbers": [3, {"y": [1.5, None, 2], "z": [1, 2, 3]}, {"y": "continuous"}, []],
        "joint": [2, {"a": [True, False], "b": [1, 2]}, {}, [["a", "b"]]],
        "array": [3, {"z": {"dtype": ">i4", "values": [1, 2, 3]}}, None, []],
        "columns": [2, {"y": [[1.0, 2.0], [3.0, 4.0]]}, {}, []],
        "one column": [3, ["x", "y", "z"], None, []],
        "mixed": [3, {"z": [1, "a", True]}, {}, []],
        "too short": [3, {"z": [1, 2]}, {}, []],
    }.items():
        (HERE / "labels" / name).write_text(json.dumps(value))


if __name__ == "__main__":
    main()
