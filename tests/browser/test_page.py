"""The live page in a real browser, over synthetic traffic."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from browser.page_server import PageServer
from browser.synthetic import SyntheticGateway

from baton.core.membership import Role

LIVE = "[data-state=live]"
HOSTILE = "<img src=x onerror=alert(1)>"


def text_of(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.inner_text())


def wait_text(page: Any, selector: str, pattern: str) -> None:
    page.wait_for_function(
        "([selector, pattern]) => new RegExp(pattern).test("
        "document.querySelector(selector)?.innerText ?? '')",
        arg=[selector, pattern],
    )


def test_figures_come_and_change(busy: PageServer, open_page: Callable[..., Any]) -> None:
    page = open_page(busy.url)
    page.wait_for_selector(LIVE)
    assert page.title() == "Qwen3-8B · Baton"
    assert re.fullmatch(r"[\d.]+ %", text_of(page, "#attainment"))
    labels = page.locator("[role=img]").evaluate_all("nodes => nodes.map(n => n.ariaLabel)")
    assert len(labels) == 8
    assert all(re.search(r"\d", label) for label in labels), labels
    # The canvas is not blank, and the figures change.
    drawn = page.locator("#ttft-lines canvas").evaluate(
        "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    )
    assert drawn > 10
    before = page.locator("#stats").inner_text()
    page.wait_for_function("before => document.getElementById('stats').innerText !== before",
                           arg=before)  # fmt: skip
    assert len(page.locator("tr.call").all()) == 20


def test_what_engines_have_cached_by_tier_and_source(
    busy: PageServer, open_page: Callable[..., Any]
) -> None:
    page = open_page(busy.url)
    wait_text(page, "#index", "prefill-0.0")
    rows = [row.split("\t") for row in page.locator("#index tbody tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["prefill-0.0", "prefill-0.1", "decode-0.0", "decode-0.1"]
    engine = next(e for e in busy.gateway.table.engines.values() if e.name == "decode-0.1")
    on_device, in_host = busy.gateway.table.mirror.counts(engine.incarnation)
    assert rows[3][1].startswith(f"{on_device:,} blocks, ")
    assert rows[3][2].startswith(f"{in_host:,} blocks, ")
    wait_text(page, "#index tbody tr", "12\\.5 %")  # hits in host memory
    wait_text(page, "#index tbody tr", "2\\.5 %")


def test_one_call_opens_to_its_timeline(busy: PageServer, open_page: Callable[..., Any]) -> None:
    page = open_page(busy.url)
    page.wait_for_selector("tr.call")
    # This very row: concurrent calls move the others.
    finished = page.locator("tr.call:has(.badge[data-tone=plain]) .row-button")
    button = finished.nth(2).element_handle()
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    detail = page.locator("tr.opened")
    assert page.locator(f"#{button.get_attribute('aria-controls')}").count() == 1
    for word in ("prefill started", "transfer ended", "cuda_ipc", "decode admission", "Attempts"):
        assert word in detail.inner_text()
    page.wait_for_selector("#hold:not([hidden])")  # other rows came, and this row stayed in place
    assert detail.is_visible()
    page.keyboard.press("Enter")
    assert detail.count() == 0
    button.evaluate("button => button.closest('tr').lastElementChild.click()")  # any cell
    assert button.get_attribute("aria-expanded") == "true"


def test_by_keyboard(busy: PageServer, open_page: Callable[..., Any]) -> None:
    page = open_page(busy.url)
    page.wait_for_selector(LIVE)
    seen = []
    for _ in range(8):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", seen
    head = ["skip", "span-300", "span-3600", "open-definitions", "theme"]
    assert seen == [*head, "ttft-target", "tbt-target", seen[7]]
    page.locator("#open-definitions").focus()
    page.keyboard.press("Enter")
    definitions = page.locator("dialog[open]")
    assert "first to second token" in definitions.inner_text()  # as in core/metrics.py
    page.keyboard.press("Escape")
    assert definitions.count() == 0
    assert page.evaluate("document.activeElement.id") == "open-definitions"


def test_targets_are_kept_in_the_address(busy: PageServer, open_page: Callable[..., Any]) -> None:
    page = open_page(busy.url)
    page.wait_for_selector(LIVE)
    page.wait_for_function("() => document.getElementById('ttft-target').value === '500'")
    page.locator("#ttft-target").fill("0.001")
    page.keyboard.press("Enter")
    wait_text(page, "#attainment", "^0 %")
    assert "ttft_ms=0.001" in page.url
    page.reload()
    wait_text(page, "#attainment", "^0 %")
    assert page.locator("#ttft-target").input_value() == "0.001"
    page.locator("#ttft-target").fill("-5")
    page.keyboard.press("Enter")
    assert page.locator("#ttft-target").get_attribute("aria-invalid") == "true"
    assert "ttft_ms=0.001" in page.url


def test_the_hour_is_kept_when_the_page_is_loaded_again(
    serve: Callable[..., PageServer], open_page: Callable[..., Any]
) -> None:
    gateway = SyntheticGateway()
    gateway.add_usual_engines()
    gateway.live_through(1500, 0.5)
    page = open_page(serve(gateway, 5).url)
    wait_text(page, "#span-note", "last 5 min")
    requests = "() => Number(document.querySelector('#stats').innerText.match(/([\\d,]+) requests/)"
    few = page.evaluate(f"{requests}[1].replace(',', ''))")
    page.locator("#span-3600").click()
    wait_text(page, "#span-note", "last hour")
    assert page.evaluate(f"{requests}[1].replace(',', ''))") > 3 * few
    assert "span_s=3600" in page.url
    page.reload()
    wait_text(page, "#span-note", "last hour")
    assert page.locator("#span-3600").get_attribute("aria-pressed") == "true"
    page.locator("#ttft-lines summary").click()
    wait_text(page, "#ttft-lines tbody", r"\d\d:\d\d:\d\d")
    times = page.locator("#ttft-lines tbody td:first-child").all_inner_texts()
    seconds = [int(time[-2:]) for time in times if time]
    assert len(seconds) > 3
    assert len({second % 30 for second in seconds}) == 1  # one row every half minute


def test_several_gateways_and_one_alone(
    serve: Callable[..., PageServer], open_page: Callable[..., Any]
) -> None:
    gateway = SyntheticGateway()
    gateway.num_gateways = 3
    gateway.add_usual_engines()
    gateway.live_through(30, 5)
    page = open_page(serve(gateway, 5).url)
    wait_text(page, "#span-note", "3 gateways")
    assert page.locator(".card.gateway").count() == 3
    assert page.locator(".edge.ask").count() == 6
    assert page.locator("#alone").is_hidden()
    gateway.is_shared = False
    page.wait_for_selector("#alone:not([hidden])")
    assert re.search(r"Since \d\d:\d\d:\d\d .* this gateway", text_of(page, "#alone"))
    assert page.locator(".card.gateway").count() == 1


def test_a_gateway_that_hangs(
    serve: Callable[..., PageServer], open_page: Callable[..., Any]
) -> None:
    """The page shows a gateway as stale whose stream is open but silent."""
    gateway = SyntheticGateway()
    server = serve(gateway, 5)
    page = open_page(server.url)
    page.wait_for_selector(LIVE)
    tick = gateway.feed.tick
    server.do(lambda: setattr(gateway.feed, "tick", lambda: None))
    page.wait_for_selector("[data-state=stale]")
    assert text_of(page, "#state") == "Stale"
    assert "No new data" in text_of(page, "#notice")
    server.do(lambda: setattr(gateway.feed, "tick", tick))
    page.wait_for_selector(LIVE)
    assert page.locator("#notice").is_hidden()


def test_no_traffic_and_an_engine_that_goes(
    serve: Callable[..., PageServer], open_page: Callable[..., Any]
) -> None:
    gateway = SyntheticGateway()
    gateway.add_usual_engines()
    server = serve(gateway)
    page = open_page(server.url)
    page.wait_for_selector(LIVE)
    assert "No traffic" in text_of(page, "#empty")
    assert f"curl -N {server.origin}/v1/chat/completions" in text_of(page, "#curl")
    assert page.locator(".card").count() == 5
    server.do(lambda: gateway.lose("decode-0.1"))
    page.wait_for_selector(".card[data-state=gone]")
    gone = page.locator(".card[data-state=gone]")
    assert "decode-0.1" in gone.inner_text()
    assert "GPU 3" in gone.inner_text()
    assert "Gone" in gone.inner_text()
    server.do(lambda: gateway.add_engine("decode-0.1", Role.DECODE) and None)
    wait_text(page, ".cluster", "restarted 1×")
    assert page.locator(".card").count() == 5


def test_many_engines_leave_room_for_the_rest_of_the_page(
    serve: Callable[..., PageServer], open_page: Callable[..., Any]
) -> None:
    gateway = SyntheticGateway()
    sources = [gateway.add_engine(f"prefill-{i}", Role.PREFILL) for i in range(12)]
    links = frozenset(member.incarnation for member in sources)
    for i in range(24):
        gateway.add_engine(f"decode-{i}", Role.DECODE, links)
    gateway.live_through(30, 5)
    page = open_page(serve(gateway, 5).url)
    page.wait_for_selector(".card.decode")
    panel = page.locator(".cluster-panel").bounding_box()
    assert panel["height"] < 1000
    for kind in ("gateway", "prefill", "decode"):
        card = page.locator(f".card.{kind}").first.bounding_box()
        assert card["y"] + card["height"] < panel["y"] + panel["height"], f"{kind} is not seen"
    links_of_one = page.locator(".card.decode .links").first.locator("li")
    assert links_of_one.count() == 7
    assert links_of_one.last.inner_text() == "and 6 more"
    assert page.locator(".edge.kv").count() == 12 * 24
    page.locator(".card.decode").last.scroll_into_view_if_needed()
    assert page.evaluate("document.querySelector('.cluster-panel').scrollTop") > 0


def test_hostile_names_are_text(
    serve: Callable[..., PageServer], open_page: Callable[..., Any]
) -> None:
    gateway = SyntheticGateway(tenant=HOSTILE, model=f"{HOSTILE}'\"</title>")
    gateway.add_engine(f"prefill{HOSTILE}", Role.PREFILL)
    gateway.live_through(20, 4)
    page = open_page(serve(gateway).url)
    page.on("dialog", lambda dialog: pytest.fail("a script ran"))
    page.wait_for_selector("tr.call")
    page.locator(".row-button").first.click()
    for selector in ("#model", ".card.prefill h4", "tr.opened"):
        assert HOSTILE in text_of(page, selector)
    assert page.locator("img").count() == 0
    assert page.title().startswith(HOSTILE)


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1920, "dark")])
def test_fits_and_can_be_read(
    busy: PageServer, open_page: Callable[..., Any], width: int, scheme: str
) -> None:
    viewport = {"width": width, "height": 900}
    page = open_page(busy.url, viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
    page.wait_for_selector("tr.call")
    page.locator(".row-button").first.click()
    page.locator("#ttft-lines summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(NAMES) == []
    assert page.evaluate(FAINT) == []
    assert page.evaluate("document.getAnimations().length") == 0
    # The button overrides the system's setting: auto, light, dark.
    colour = page.evaluate("getComputedStyle(document.body).color")
    for _ in range(2 if scheme == "light" else 1):
        page.locator("#theme").click()
    other = "dark" if scheme == "light" else "light"
    assert page.locator("#theme").get_attribute("aria-label") == f"Theme: {other}"
    assert page.evaluate("getComputedStyle(document.body).color") != colour
    assert page.evaluate(FAINT) == []


# Text whose contrast with its background is under 4.5 (WCAG 2, relative luminance).
FAINT = """() => {
  const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour[3] === undefined || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push([walker.currentNode.textContent, ratio]);
  }
  return faint;
}"""

# Elements that a screen reader could not name or locate.
NAMES = """() => {
  const wrong = [];
  const has = (selector) => document.querySelectorAll(selector).length === 1;
  for (const selector of ["main", "body > header", "h1", "[role=status][aria-live=polite]"]) {
    if (!has(selector)) wrong.push(`not one ${selector}`);
  }
  for (const node of document.querySelectorAll("button, a, input, [role=img], [role=region]")) {
    const labelled = node.getAttribute("aria-labelledby");
    const label = labelled ? document.getElementById(labelled).textContent : null;
    const name = node.ariaLabel || label || node.labels?.[0]?.textContent || node.textContent;
    if (!name?.trim()) wrong.push(`no name: ${node.outerHTML}`);
  }
  let level = 1;
  for (const heading of document.querySelectorAll("h1, main h2, main h3, main h4")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) wrong.push(`${heading.tagName} ${heading.textContent} after h${level}`);
    level = next;
  }
  for (const section of document.querySelectorAll("main > section")) {
    const title = document.getElementById(section.getAttribute("aria-labelledby"));
    if (!title) wrong.push(`section without a title: ${section.className}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  if (new Set(ids).size !== ids.length) wrong.push("an id twice");
  return wrong;
}"""
