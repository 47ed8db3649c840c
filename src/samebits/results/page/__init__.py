"""``reports/index.html``: the answers of a comparison on one page, which needs no network and no script to be read."""
