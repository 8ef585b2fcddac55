"""``k3tune report``: what a run's log says, as a page, as Markdown and as JSON.

:mod:`k3tune.report.reading` reads logs, :mod:`k3tune.report.document` makes of them the one set of
facts that :mod:`~k3tune.report.page`, :mod:`~k3tune.report.markdown` and the JSON output show.
"""
