"""Fit to shards on disk, one at a time in memory, and resume after an interruption.

python examples/resume.py [FOLDER]
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
    np.savez(folder / f"shard{i}.npz", rows=rows, topic=topic)


def read(interrupted_at=None):
    for i in range(6):
        if i == interrupted_at:  # as Ctrl-C does
            raise KeyboardInterrupt
        with np.load(folder / f"shard{i}.npz") as shard:
            yield shard["rows"], {"topic": shard["topic"]}


checkpoint = folder / "run.moments"
try:
    sf.Moments.from_blocks(read(interrupted_at=4), checkpoint=checkpoint)
except KeyboardInterrupt:
    print(f"interrupted at {sf.Moments.load(checkpoint).n_rows:,} of 30,000 rows")
moments = sf.Moments.from_blocks(read(), checkpoint=checkpoint)  # the same call resumes
eraser = sf.leace(moments, erase="topic")
print(eraser.report.explain())
for i, (rows, _) in enumerate(read()):
    np.save(folder / f"clean{i}.npy", eraser(rows))
