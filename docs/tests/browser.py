#!/usr/bin/env python3
"""Reads the built book as a person would: every page in Chromium, on a desktop and on a phone.

  browser.py BOOK CHROMIUM SCREENSHOTS

Run by `cargo xtask docs --browser CHROMIUM`. A page fails if a script or a request fails, a picture does not load, a link or
the place in a page that it names is not there, or a person has to scroll sideways. The search and the dark theme are tried
once. Leaves a picture of each page in SCREENSHOTS. Prints what fails, and exits 1 if anything does.
"""
import functools
import http.server
import pathlib
import sys
import threading

from playwright.sync_api import sync_playwright

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
FIND_LINKS = "links => links.map(link => link.href)"
FIND_MISSING_PICTURES = "pictures => pictures.filter(p => !(p.complete && p.naturalWidth)).map(p => p.src)"
FIND_OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
FIND_IDS = "elements => elements.map(element => element.id)"
BACKGROUND = "() => getComputedStyle(document.documentElement).backgroundColor"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def serve(book):
    """Serves the book on a free port of this machine, and returns its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=book))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def read_pages(browser, base, names, screenshots, failures):
    """Opens every page at every width. Returns the links of each page, and the names of the places in it."""
    links, places = {}, {}
    for width_name, (width, height) in WIDTHS.items():
        page = browser.new_page(viewport={"width": width, "height": height})
        current = [""]
        page.on("pageerror", lambda error: failures.append(f"{current[0]}: a script failed: {error}"))
        page.on("requestfailed", lambda request: failures.append(f"{current[0]}: failed to load {request.url}"))
        page.on("response", lambda response: response.status < 400
                or failures.append(f"{current[0]}: {response.status} for {response.url}"))
        for name in names:
            current[0] = f"{name} ({width_name})"
            page.goto(base + name, wait_until="networkidle")
            missing = page.eval_on_selector_all("main img", FIND_MISSING_PICTURES)
            failures.extend(f"{current[0]}: the picture {source} does not load" for source in missing)
            overflow = page.evaluate(FIND_OVERFLOW)
            if overflow > 0:
                failures.append(f"{current[0]}: is {overflow} pixels wider than the window")
            links[name] = page.eval_on_selector_all("a[href]", FIND_LINKS)
            places[name] = set(page.eval_on_selector_all("[id]", FIND_IDS))
            page.screenshot(path=screenshots / f"{name.replace('/', '-')}-{width_name}.png")
        page.close()
    return links, places


def check_links(base, links, places, failures):
    """Checks that every link inside the book leads to a page, and to a place in it."""
    for name, targets in links.items():
        for target in targets:
            if not target.startswith(base):
                continue
            path, _, place = target.removeprefix(base).partition("#")
            path = path.partition("?")[0]
            path = path or "index.html"
            if path not in places:
                failures.append(f"{name}: a link leads to `{path}`, which is no page")
            elif place and place not in places[path]:
                failures.append(f"{name}: `{path}` has no place `{place}`")


def check_search(browser, base, failures):
    """Looks a word up as a reader does: opens the search, types, and follows the first result."""
    page = browser.new_page()
    page.goto(base + "index.html", wait_until="networkidle")
    page.click("#mdbook-search-toggle, #search-toggle")
    page.keyboard.type("reshard", delay=20)
    results = page.locator("#mdbook-searchresults a, #searchresults a")
    try:
        results.first.wait_for(timeout=20_000)
    except Exception:
        failures.append("the search finds nothing for `reshard`")
        return
    results.first.click()
    page.wait_for_load_state("networkidle")
    if "reshard" not in page.inner_text("main").lower():
        failures.append(f"the first result for `reshard`, {page.url}, does not have the word")
    page.close()


def check_dark_theme(browser, base, failures):
    """Opens the book as somebody whose system is dark."""
    backgrounds = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(base + "index.html", wait_until="networkidle")
        backgrounds[scheme] = page.evaluate(BACKGROUND)
        page.close()
    if backgrounds["light"] == backgrounds["dark"]:
        failures.append(f"the dark theme has the background of the light one, {backgrounds['light']}")


def main():
    book, chromium, screenshots = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    screenshots.mkdir(parents=True, exist_ok=True)
    names = sorted(str(path.relative_to(book)) for path in pathlib.Path(book).rglob("*.html"))
    # The frame of the list of pages, and the page that holds the whole book for printing, are not read by themselves.
    names = [name for name in names if name not in ("toc.html", "print.html", "404.html")]
    if not names:
        sys.exit(f"no pages in `{book}`")
    base = serve(book)
    failures = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        links, places = read_pages(browser, base, names, screenshots, failures)
        check_links(base, links, places | {"print.html": set()}, failures)
        check_search(browser, base, failures)
        check_dark_theme(browser, base, failures)
        browser.close()
    for failure in failures:
        print(f"failed: {failure}")
    print(f"{len(names)} pages at {len(WIDTHS)} widths, {sum(map(len, links.values()))} links, {len(failures)} failures")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
