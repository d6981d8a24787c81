"""A stream of shards: fit as they arrive, resume after an interruption, take rows back on request.

    python examples/stream.py [FOLDER]

One shard is in memory at a time. A person who withdraws is subtracted from the moments: the new
eraser is that of a fit without the person, and no row of anyone else is read again.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import splince_fast as sf

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
rng = np.random.default_rng(0)
for i in range(6):
    topic = rng.integers(0, 3, size=5000)
    rows = rng.normal(size=(5000, 64)) + 2 * np.eye(3, 64)[topic]
    np.savez(folder / f"shard{i}.npz", rows=rows, topic=topic, person=rng.integers(0, 100, 5000))


def read(people=range(100), interrupted_at=None):
    for i in range(6):
        if i == interrupted_at:  # as Ctrl-C does
            raise KeyboardInterrupt
        with np.load(folder / f"shard{i}.npz") as shard:
            selected = np.isin(shard["person"], people)
            yield shard["rows"][selected], {"topic": shard["topic"][selected]}


checkpoint = folder / "run.moments"
try:
    sf.Moments.from_blocks(read(interrupted_at=4), checkpoint=checkpoint)
except KeyboardInterrupt:
    print(f"interrupted at {sf.Moments.load(checkpoint).n_rows:,} of 30,000 rows")
moments = sf.Moments.from_blocks(read(), checkpoint=checkpoint)  # the same call resumes

withdrawn = [7, 42]
others = np.setdiff1d(range(100), withdrawn)
remaining = moments - sf.Moments.from_blocks(read(withdrawn))
eraser = sf.leace(remaining, erase="topic")
fits, differences = {"with them": moments, "anew": sf.Moments.from_blocks(read(others))}, {}
for name, fit in fits.items():
    differences[name] = np.abs(eraser.matrix() - sf.leace(fit, erase="topic").matrix()).max()
    print(f"{remaining.n_rows:,} rows left; the eraser fitted {name}: {differences[name]:.0e} away")


def clean():
    for i, (rows, labels) in enumerate(read(others)):
        np.save(folder / f"clean{i}.npy", eraser(rows))
        yield eraser(rows), labels


for name, blocks in {"before": read(others), "after": clean()}.items():
    covariance = sf.Moments.from_blocks(blocks).cross_covariance("topic")
    print(f"largest covariance with a topic {name}: {np.abs(covariance).max():.0e}")
