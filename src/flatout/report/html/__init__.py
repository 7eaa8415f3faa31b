"""The report as one HTML file: no script, no network, drawn once for light and for dark."""

from flatout.report.html.ladder import ladder_html
from flatout.report.html.page import html_report

__all__ = ["html_report", "ladder_html"]
