"""From state to effect: what is selected, the options, and what the solver's status means."""
