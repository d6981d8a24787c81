"""Word vectors without a stereotype: a GloVe text file in, one of the same format out.

    pip install ".[words]" && python examples/word_vectors.py [FOLDER]

The vectors are those of 240 nouns in SmolLM2-135M-Instruct, which ship with the package: the mean
of 20 prompts, in 50 dimensions. The stereotype of an occupation is the fraction of men in it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import splince_fast as sf
from splince_fast.demo import data as professions

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
tables = professions.load()
words = [noun.replace(" ", "_") for noun in tables.nouns]
states = tables.activations.reshape(len(words), -1, 576).mean(axis=1)
left, sizes, _ = np.linalg.svd(states - states.mean(axis=0), full_matrices=False)
np.savetxt(
    folder / "vectors.txt",
    np.column_stack([words, (left * sizes)[:, :50].astype(np.float32).astype(str)]),
    fmt="%s",
)
labels = {
    "stereotype": dict(zip(words, tables.stereotype.tolist(), strict=True)),
    "gender": dict(zip(words, tables.factual.tolist(), strict=True)),  # 1 for "king"
}

source = sf.sources.from_word_vectors(folder / "vectors.txt", labels)
kinds = dict.fromkeys(labels, "continuous")
moments = sf.Moments.from_blocks(source, kinds=kinds)
sf.splince(moments, erase="stereotype", keep="gender").save(folder / "fair.safetensors")
names = ["apply", "fair.safetensors", "vectors.txt", "-o", "clean.txt"]  # splince-fast apply ...
subprocess.run([sys.executable, "-m", "splince_fast", *names], cwd=folder, check=True)

fits = {}
for name in ("vectors.txt", "clean.txt"):
    blocks = sf.sources.from_word_vectors(folder / name, labels)
    fits[name] = sf.Moments.from_blocks(blocks, kinds=kinds)
    sizes = (f"{v} {np.linalg.norm(fits[name].cross_covariance(v)):.1e}" for v in kinds)
    rows = np.concatenate([block.X for block in blocks])
    rows -= rows.mean(axis=0)
    cosines = rows @ rows[words.index("mechanic")] / np.linalg.norm(rows, axis=1)
    nearest = [words[i] for i in np.argsort(-cosines)[1:6]]
    print(f"{name}: covariance with {', '.join(sizes)}; nearest to mechanic: {', '.join(nearest)}")
