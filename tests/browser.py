"""A real browser, Debian's chromium, by whose eyes tests and benchmarks look at pages of ours."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

PATIENCE = 60  # seconds, on a busy machine, for what takes a tenth of one
# Colours of the pixels of each chart, copied: to read a chart's own canvas again and again is a warning of Chromium's.
# Charts are drawn once they are near the window: the first that is not is brought there, until there is none.
COLOURS = """
if (!document.querySelector("nav a[aria-current]")) return null;
const plots = [...document.querySelectorAll(".plot")].filter((plot) => plot.offsetParent);
const colours = plots.map((plot) => {
  const [canvas, copy] = [plot.querySelector("canvas"), document.createElement("canvas")];
  if (!canvas || !canvas.width) return 0;
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  return new Set(new Uint32Array(context.getImageData(0, 0, copy.width, copy.height).data.buffer)).size;
});
const pale = plots.find((_, place) => colours[place] <= 50);
pale?.scrollIntoView();
return pale ? null : [colours];
"""
SHOWN = """
const [css, text] = arguments, holder = (element) => (element.tagName === "OPTION" ? element.parentElement : element);
const isShown = { visibilityProperty: true };
const seen = (element) => element.innerText.includes(text) && holder(element).checkVisibility(isShown);
return [...document.querySelectorAll(css)].filter(seen);
"""


class Browser:
    """A reader of reports, who clicks, points and types."""

    def __init__(self, driver: Chrome) -> None:
        self.driver, self.run = driver, driver.execute_script

    def open(self, address: Path | str, width: int = 1600, dark: bool = False) -> None:
        """Opens a page anew in a window of this width, and forgets what the one before has said."""
        address = address if isinstance(address, str) else address.as_uri()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.get("about:blank")
        self.complaints()
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(address)

    def complaints(self) -> list[str]:
        """Lists messages of the console, and requests beyond the page itself."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        requests = [event["params"]["request"] for event in events if event["method"] == "Network.requestWillBeSent"]
        own = self.driver.current_url.split("#")[0]
        asked = [request["url"].split("#")[0] for request in requests]
        foreign = [url for url in asked if not url.startswith((own, "data:", "blob:"))]
        return [entry["message"] for entry in self.driver.get_log("browser")] + foreign

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Waits until `condition` holds, and returns what it then is."""
        return WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: condition())

    def drawn(self) -> list[int]:
        """Scrolls to all charts of a tab, one after the other, and returns how many colours each has."""
        return self.wait(lambda: self.run(COLOURS))[0]

    def all(self, css: str, text: str = "") -> list[WebElement]:
        """Lists the elements that are shown, with this text in them; an option of a menu is shown if its menu is."""
        return self.run(SHOWN, css, text)

    def see(self, css: str, text: str = "") -> WebElement:
        """Waits for an element that is shown, with this text in it."""
        return self.wait(lambda: self.all(css, text))[0]

    def click(self, css: str, text: str = "") -> None:
        element = self.see(css, text)
        self.run("arguments[0].scrollIntoView({ block: 'center' })", element)  # from below the head of the page
        element.click()

    def turn_to(self, tab: str) -> None:
        self.click("nav a", tab)
        self.see("nav a[aria-current]", tab)

    def point(self, element: WebElement) -> None:
        ActionChains(self.driver, duration=0).move_to_element(element).perform()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def texts(self, css: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((found) => found.textContent)", css)


@contextmanager
def chromium() -> Iterator[Chrome]:
    """Starts a browser without a window, three seconds of CPU. Raises FileNotFoundError if there is none."""
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        raise FileNotFoundError("needs Debian's packages chromium and chromium-driver")
    options = ChromeOptions()
    options.binary_location = found[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, Service(found[1]))
    try:
        yield driver
    finally:
        driver.quit()
