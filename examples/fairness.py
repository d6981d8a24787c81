"""A classifier of professions without gender: scikit-learn and fairlearn on a pandas DataFrame.

The rows are sentence embeddings with the profession masked, from reproduction/.

    python examples/fairness.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from fairlearn.metrics import equalized_odds_difference
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import Pipeline

import splince_fast as sf

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
data = dict(np.load(Path(__file__).parents[1] / "reproduction" / "bios.npz"))
rows = data["centre"] + data["step"] * data["codes"].astype(np.float32)
X = pd.DataFrame(rows).add_prefix("x").loc[:, lambda x: x.std() > 1e-6]
labels = pd.DataFrame({"man": data["z"] == 1, "artist": data["y"] == 1})
X, X_test, labels, labels_test = train_test_split(X, labels, test_size=0.4, random_state=0)

scores = pd.DataFrame(columns=["accuracy", "equalised odds difference", "gender probe"])
for eraser in (sf.Identity(), sf.LEACE(), sf.SPLINCE()):
    head, probe = (LogisticRegression(C=0.1, max_iter=1000) for _ in range(2))
    model = Pipeline([("eraser", eraser.set_output(transform="pandas")), ("head", head)])
    model.fit(X, labels["artist"], eraser__concept=labels[["man"]])
    true, predicted, man = labels_test["artist"], model.predict(X_test), labels_test["man"]
    gap = equalized_odds_difference(true, predicted, sensitive_features=man)
    probe.fit(eraser.transform(X), labels["man"])
    probe_accuracy = probe.score(eraser.transform(X_test), man)
    scores.loc[str(eraser)] = [model.score(X_test, true), gap, probe_accuracy]
print(eraser.report_.explain(), scores.round(3), sep="\n\n")
eraser.projection_.save(folder / "gender.safetensors")
