"""The laws of an honest report, judged from its JSON alone; nothing of flatout is imported."""

from __future__ import annotations

from typing import Any

SPREAD = 0.05
LARGEST_GAIN = 10.0


def broken_laws(report: dict[str, Any]) -> list[str]:
    """What a report claims that cannot be so."""
    diagnosis, steps = report["diagnosis"], report["evidence"]["steps"]
    whole_s = diagnosis["step_s"]
    if not whole_s:
        return []
    broken = []
    floor_s = diagnosis["floor_s"]
    if floor_s is not None and floor_s > (1 + SPREAD) * whole_s:
        broken.append(f"the step's floor of {floor_s:.3g} s is above the step of {whole_s:.3g} s")
    for line in diagnosis["hot_lines"]:
        if line["floor_s"] is not None and line["floor_s"] > (1 + SPREAD) * line["seconds"]:
            broken.append(f"floor of {line['source']['file']}:{line['source']['line']} above its time")
    costs_s = 0.0
    for finding in diagnosis["findings"]:
        cost_s, (low, high) = finding["cost_s"], finding["gain"]
        costs_s += cost_s
        left_s = whole_s - cost_s
        most = whole_s / left_s if left_s > 0 else float("inf")
        if low > high * 1.001 or low < 0.999:
            broken.append(f"{finding['rule']}: a gain of {low:.2f} to {high:.2f}")
        if high > (1 + SPREAD) * most:
            broken.append(f"{finding['rule']}: a gain of {high:.2f} by a cost that allows {most:.2f}")
    if costs_s > (1 + SPREAD) * whole_s:
        broken.append(f"causes of {costs_s:.3g} s in a step of {whole_s:.3g} s")
    if not (1 - 1e-6) * steps["low_s"] <= steps["step_s"] <= (1 + 1e-6) * steps["high_s"]:
        broken.append(
            f"the step {steps['step_s']:.4g} s is outside its interval {steps['low_s']:.4g} - {steps['high_s']:.4g}"
        )
    phases_s = sum(steps["phases"].values())
    if phases_s > (1 + SPREAD) * max(whole_s, steps["step_s"]):
        broken.append(f"phases of {phases_s:.4g} s in a step of {whole_s:.4g} s")
    if not -1e-9 <= diagnosis["unexplained_s"] <= whole_s * (1 + 1e-9):
        broken.append(f"unexplained {diagnosis['unexplained_s']:.3g} s of {whole_s:.3g} s")
    return broken
