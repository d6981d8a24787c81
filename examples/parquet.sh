#!/bin/sh
# Erase gender from a Parquet file on the command line: people.parquet in, clean.parquet out.
#     sh examples/parquet.sh [FOLDER]
set -eu
cd "${1:-$(mktemp -d)}"

# A table of 10,052 people from data that ship with the package; use your own file instead.
python - <<'END'
import pyarrow as pa
import pyarrow.parquet as pq
from splince_fast.experiments import datasets

data = datasets.load("bios")
people = {"id": range(10_052), "embedding": list(data.X)}
people |= {"man": data.labels["concept"] == 1, "artist": data.labels["task"] == 1}
pq.write_table(pa.table(people), "people.parquet", row_group_size=2000)
END

splince-fast fit people.parquet --embedding embedding --erase man --keep artist \
    --min-scale 1e-6 --checkpoint run.moments -o gender.safetensors
splince-fast apply gender.safetensors people.parquet --embedding embedding -o clean.parquet
splince-fast inspect gender.safetensors
echo "written: $PWD/clean.parquet"
