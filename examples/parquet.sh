#!/bin/sh
# Erase gender from a Parquet file on the command line: people.parquet in, clean.parquet out.
#     sh examples/parquet.sh [FOLDER]
set -eu
rows=$(cd "$(dirname "$0")/.." && pwd)/reproduction/bios.npz
cd "${1:-$(mktemp -d)}"

# A table of 10,052 people from data of the repository; use your own file instead.
python - "$rows" <<'END'
import sys
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

data = np.load(sys.argv[1])
X = data["centre"] + data["step"] * data["codes"].astype(np.float32)
people = {"id": range(len(X)), "embedding": list(X), "man": data["z"] == 1, "artist": data["y"] == 1}
pq.write_table(pa.table(people), "people.parquet", row_group_size=2000)
END

splince-fast fit people.parquet --embedding embedding --erase man --keep artist \
    --checkpoint run.moments -o gender.safetensors
splince-fast apply gender.safetensors people.parquet --embedding embedding -o clean.parquet
splince-fast inspect gender.safetensors

python - <<'END'
import numpy as np
import pyarrow.parquet as pq

for name in ("people", "clean"):
    table = pq.read_table(f"{name}.parquet", columns=["embedding", "man"])
    X, man = np.stack(table["embedding"].to_numpy()).astype(float), table["man"].to_numpy()
    gap = np.abs(X[man].mean(axis=0) - X[~man].mean(axis=0)).max()
    print(f"{name}.parquet: the means of women and men differ by up to {gap:.0e}")
END
