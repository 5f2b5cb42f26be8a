"""The page for people: a verdict, five figures, plots and tables in one HTML file that needs no network."""

from cosytriton_loadtests.report.page import write_report

__all__ = ["write_report"]
