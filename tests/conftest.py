"""`--forbid-skips`: a test that would be skipped fails the run, so that CI cannot lose one by a missing package."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forbid-skips", action="store_true", help="fail when a test was skipped (GPU tests aside)")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--forbid-skips"):
        return
    skipped = [report for report in reporter.stats.get("skipped", []) if not report.nodeid.startswith("tests/gpu")]
    for report in skipped:
        reporter.write_line(f"skipped, which --forbid-skips forbids: {report.nodeid}: {report.longrepr}")
    if skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
