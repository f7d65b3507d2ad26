"""LLaMA-Factory's web UI in a real browser: from choosing a model and the booster "unsloth" to the loss curve.

On demand: ``make test-llamafactory-webui`` installs what it needs and shows where the screenshot lies.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.llamafactory.runs import REPOSITORY, assert_equal, command, read

pytestmark = pytest.mark.webui

STEPS = 12
EXTRA = {
    "optim": "adamw_torch", "max_steps": STEPS, "logging_steps": 1, "learning_rate": 0.003, "use_cpu": True,
    "preprocessing_num_workers": 1, "gradient_accumulation_steps": 1, "dataloader_num_workers": 0,
}  # fmt: skip
PATIENCE = 240
"""Seconds."""


@pytest.fixture
def address(workplace: Path, tmp_path: Path) -> Iterator[str]:
    """The web UI, started as a user starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "GRADIO_SERVER_NAME": "127.0.0.1",
        "GRADIO_SERVER_PORT": str(port),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "BROWSER": "true",  # the UI opens the desktop's browser otherwise
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "slothplug.cli.main", "run", "llamafactory-cli", "webui"]
    with (tmp_path / "webui.log").open("w") as log:
        server = subprocess.Popen(words, cwd=workplace, env=environment, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: server.poll() is None and answers(url), "the web UI to answer")
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


@pytest.fixture
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    assert driver, "chromedriver was not found: apt-get install chromium chromium-driver"
    assert chromium, "chromium was not found: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1500,2200"):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


class Page:
    """The parts of LLaMA-Factory's page by the words that stand on them."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def find(self, path: str) -> Any:
        shown: list[Any] = []
        until(
            lambda: (
                shown.extend(one for one in self.browser.find_elements("xpath", path) if one.is_displayed()) or shown
            ),
            path,
        )
        return shown[0]

    def press(self, button: str) -> None:
        self.find(f"//button[normalize-space()='{button}']").click()

    def unfold(self, title: str) -> None:
        self.find(f"//button[starts-with(normalize-space(), '{title}')]").click()

    def write(self, label: str, text: str) -> None:
        box = self.find(f"//label[.//span[normalize-space()='{label}']]//textarea")
        box.clear()
        box.send_keys(text)
        until(lambda: box.get_attribute("value") == text, f"{label} to hold {text}")

    def choose(self, label: str, choice: str) -> None:
        box = self.find(f"//input[@role='listbox' and @aria-label='{label}']")
        box.click()
        box.send_keys(self.keys.CONTROL, "a")
        box.send_keys(choice)
        self.find(f"//ul[@role='listbox']/li[@aria-label='{choice}']").click()
        until(lambda: box.get_attribute("value") == choice, f"{label} to show {choice}")

    def add(self, label: str, choice: str) -> None:
        """Chooses one in a list of which several may be chosen."""
        box = self.find(f"//label[.//span[normalize-space()='{label}']]//input")
        box.click()
        box.send_keys(choice, self.keys.ENTER)

    @property
    def keys(self) -> Any:
        from selenium.webdriver.common.keys import Keys

        return Keys


def test_from_the_model_to_the_loss_curve(workplace: Path, tmp_path: Path, address: str, browser: Any) -> None:
    browser.get(address)
    page = Page(browser)
    page.choose("Model name", "Custom")
    page.write("Model path", "model")
    page.choose("Booster", "unsloth")
    page.write("Data dir", ".")
    page.add("Dataset", "sft")
    page.choose("Compute type", "fp32")
    page.unfold("Extra configurations")
    page.write("Extra arguments", json.dumps(EXTRA))
    page.press("Start")
    screenshot = tmp_path / "webui.png"
    try:
        page.find("//*[contains(text(), 'Training completed')]")
        plot = page.find("//*[@data-testid='matplotlib']//img")
        until(lambda: plot.get_property("naturalWidth") > 100, "the loss curve to be drawn")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
        shown = " ".join(page.find("//body").text.split())
    finally:
        browser.save_screenshot(str(screenshot))
        print(f"screenshot: {screenshot}")
    assert "lora 14/14 (torch)" in shown
    assert "is served by slothplug, since Unsloth is not installed" in shown

    (folder,) = (workplace / "saves" / "Custom" / "lora").iterdir()
    written = yaml.safe_load((folder / "training_args.yaml").read_text())
    assert written["use_unsloth"] is True
    on = read(folder)
    assert len(on.logged("loss")) == STEPS
    words = [str(folder / "training_args.yaml"), "use_unsloth=false", f"output_dir={tmp_path / 'stock'}"]
    done = command(workplace, "llamafactory-cli", "train", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_equal(on, read(tmp_path / "stock"))


def until(condition: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
        time.sleep(0.5)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
