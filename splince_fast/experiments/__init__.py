"""The paper's experiments, one command each: ``python -m splince_fast.experiments NAME``.

Each command prints results with intervals over seeds, then the values printed in the paper. Last,
it lists the claims of the paper that the results confirm, contradict or leave undecided.
``docs/experiments.md`` lists the results.
"""

from __future__ import annotations

# Subject of each experiment, with the label of the figure or table in the paper.
NAMES = {
    "bios": "Bias in Bios, association sweep (fig. classification)",
    "bios_full": "all professions, frozen and retrained heads (tab. bios_all)",
    "multilingual": "a concept of three classes (fig. classification)",
    "alphas": "differences by the penalty alpha (fig. SPLINCE_LEACE_per_lambda)",
    "covariance": "covariance with the task after erasure (fig. removal_cov)",
    "professions": "log-odds of he and she (tab. profession_main)",
    "winobias": "coreference, pro and anti stereotype (fig. winobias_main)",
    "layers": "several layers in sequence (tab. profession_all)",
    "images": "raw pixels (fig. CelebA_individual, CelebA_mean)",
    "nlp_ood": "against DFR and GroupDRO on text (fig. nlp_comp)",
    "vision_ood": "against DFR and GroupDRO on images (fig. vision_comp)",
    "waterbirds": "birds on backgrounds (fig. vision_proj)",
}

__all__ = ["NAMES"]
