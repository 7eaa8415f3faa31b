"""Why a step is slow: observation, traces, rules, trials, diagnosis."""
