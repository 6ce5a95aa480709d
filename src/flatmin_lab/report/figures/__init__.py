"""The figures of the paper and of the report: functions that return a matplotlib figure with its numbers.

drawn = figures.operational_region()
drawn.figure.savefig("region.pdf")
drawn.data["beta"]
"""

from flatmin_lab.system.optional_deps import needed_by

with needed_by("flatmin_lab.report.figures"):  # matplotlib
    from flatmin_lab.report.figures.compare import forest, seed_curves
    from flatmin_lab.report.figures.decision_boundary import boundaries
    from flatmin_lab.report.figures.landscapes import between, contours, lines, surfaces
    from flatmin_lab.report.figures.results import (
        FrontierPoint,
        TimedPoint,
        bars,
        curves,
        epsilon_sweep,
        frontier,
        over_time,
        reliability_diagram,
    )
    from flatmin_lab.report.figures.selective import RiskCurve, risk_over_coverage, roc
    from flatmin_lab.report.figures.spectrum import spectrum
    from flatmin_lab.report.figures.style import DrawnFigure
    from flatmin_lab.report.figures.theory import (
        gaussian_surface,
        gradient_penalty,
        kinked_losses,
        operational_region,
        risk_and_amp_risk,
    )
    from flatmin_lab.report.figures.tuning import tuning

__all__ = [
    "DrawnFigure",
    "FrontierPoint",
    "RiskCurve",
    "TimedPoint",
    "bars",
    "between",
    "boundaries",
    "contours",
    "curves",
    "epsilon_sweep",
    "forest",
    "frontier",
    "gaussian_surface",
    "gradient_penalty",
    "kinked_losses",
    "lines",
    "operational_region",
    "over_time",
    "reliability_diagram",
    "risk_and_amp_risk",
    "risk_over_coverage",
    "roc",
    "seed_curves",
    "spectrum",
    "surfaces",
    "tuning",
]
