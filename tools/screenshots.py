"""Take screenshots of the site and list cut blocks: python tools/screenshots.py SITE OUT

SITE is the output folder of sphinx-build. Each page is rendered at widths of 1280 and 400 pixels by
the first of chromium, google-chrome and chrome on PATH. The exit status is 1 if a block is cut: at
1280 pixels, a code block or table of the first screen that is wider than its column; at 400 pixels,
where code blocks scroll, a page that is wider than the screen.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGES = (
    "index",
    "start",
    "which",
    "performance",
    "experiments",
    "live_models",
    "api",
    "howto/parquet",
)
WIDTHS = (1280, 400)
# Script that writes the required and the available width of cut blocks into the page title.
_PROBE = """<script>
addEventListener("load", () => {
  const cut = [];
  const narrow = innerWidth < 600;
  const blocks = narrow ? "html" : "div.highlight pre, article table";
  for (const block of document.querySelectorAll(blocks)) {
    const box = block.getBoundingClientRect();
    if (box.top > innerHeight || block.closest(".pst-scrollable-table-container")) continue;
    if (block.scrollWidth > block.clientWidth + 1)
      cut.push([
        block.tagName, block.scrollWidth, block.clientWidth, block.textContent.slice(0, 60)
      ]);
  }
  document.title = "CUT" + JSON.stringify(cut);
});
</script></body>"""


def browser() -> str | None:
    """Return the path of a browser with a headless mode, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


def run(command: str, page: Path, width: int, *more: str) -> str:
    """Run the browser on a page and return its standard output."""
    with tempfile.TemporaryDirectory() as profile:
        return subprocess.run(
            [command, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={profile}", f"--window-size={width},900",
             "--virtual-time-budget=3000", *more, page.resolve().as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout  # fmt: skip


def cut(command: str, page: Path, width: int) -> list[list[object]]:
    """Return the cut blocks of a page: [tag, required width, available width, text]."""
    text = page.read_text(encoding="utf-8")
    probe = page.with_name(f"_probe_{page.name}")
    probe.write_text(text.replace("</body>", _PROBE, 1), encoding="utf-8")
    try:
        match = re.search(
            r"<title>CUT(.*?)</title>", run(command, probe, width, "--dump-dom"), re.S
        )
    finally:
        probe.unlink()
    if match is None:
        raise RuntimeError(f"{page} was not drawn")
    blocks: list[list[object]] = json.loads(match[1].replace("&gt;", ">").replace("&amp;", "&"))
    return blocks


def main() -> None:
    """Render all pages; exit with 1 if a block is cut or no browser is installed."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    command = browser() or sys.exit("no chromium, google-chrome or chrome on PATH")
    args.out.mkdir(parents=True, exist_ok=True)
    problems = 0
    for name in PAGES:
        page = args.site / f"{name}.html"
        for width in WIDTHS:
            picture = args.out / f"{name.replace('/', '_')}_{width}.png"
            run(command, page, width, f"--screenshot={picture.resolve()}")
            for block in cut(command, page, width):
                problems += 1
                print(f"{name} at {width}: {block}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
