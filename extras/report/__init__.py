"""The report of runs: `python -m extras.report RUN [RUN …]` writes one page that opens without a server.

Open it to show something else there: runs.py reads folders, summary.py says what happened, charts.py draws, samples.py
packs the rollouts, page.py puts all into page.html, with page.css and the scripts, and server.py serves that.
"""
