"""Draws docs/ui.png: the planner's page in Chromium, for one question. Run it when the page or its figures change.

python bench/ui_picture.py
"""

import io
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

QUESTION = "model=Qwen/Qwen2.5-14B&gpu=rtx-4090&gpus=2&rows=50000"
PICTURE = Path(__file__).parents[1] / "docs" / "ui.png"


def main() -> None:
    command = [sys.executable, "-m", "fitune", "ui"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 960, "height": 1180})
        page.goto(f"{address}?{QUESTION}")
        page.wait_for_selector("#ways table")
        page.evaluate("scrollTo(0, 0)")
        shot = Image.open(io.BytesIO(page.screenshot()))
        shot.quantize(64).save(PICTURE, optimize=True)
        chromium.close()
        server.terminate()
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
