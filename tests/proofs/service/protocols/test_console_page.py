"""The console in a real browser: headless Chromium, which `make proofs` fetches."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.pb.whippet.v1 import admin_pb2
from tests.chromium import Browser, Page, browser
from tests.service.conftest import Server, ask, refused
from tests.service.scraped import page_of, value
from tests.service.transport.presented import entry
from tests.waiting import wait_for

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
MARKUP = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script><b>bold</b>"
READY = "document.querySelector('#state').textContent === 'ready'"
CONTROLS = {"button", "textbox", "switch", "checkbox", "combobox", "spinbutton", "link", "DisclosureTriangle"}
# WCAG's contrast of each text with what is behind it, the least first; disabled controls are exempt.
CONTRAST = """(() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => parse(color).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = getComputedStyle(node).backgroundColor, values = parse(found);
      if (values.length < 4 || values[3] > 0) return found;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walker.nextNode());) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || node.closest(":disabled, noscript, option")) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text.data.trim().slice(0, 40)]);
  }
  return found.sort((one, other) => one[0] - other[0]).slice(0, 5);
})()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as one:
        yield one


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    with serve("--fake.step-time=0.02", "--scheduler.max-sequences=8") as one:
        yield one


@pytest.fixture
def page(chromium: Browser, server: Server) -> Iterator[Page]:
    """The page of a server, loaded. Whatever the browser complains about fails the test."""
    one = chromium.page()
    one.size(1280, 900)
    one.open(f"http://{server.metrics}/")
    one.until(READY)
    yield one
    assert one.said == []
    one.close()


def say(page: Page, text: str, tokens: int = 8, logprobs: str = "") -> None:
    page.evaluate(f"document.querySelector('#max_tokens').value = {tokens}")
    page.evaluate(f"document.querySelector('#logprobs').value = '{logprobs}'")
    page.evaluate("document.querySelector('#message').focus()")
    page.type(text)
    page.press("Enter")


def shown(page: Page, card: str) -> dict[str, str]:
    """The pairs of a list, by name."""
    found: dict[str, str] = page.evaluate(
        f"Object.fromEntries([...document.querySelectorAll('{card} dt')]"
        ".map((one) => [one.textContent, one.nextElementSibling.textContent]))"
    )
    return found


def test_figures_are_the_metrics_own(page: Page, server: Server) -> None:
    say(page, "hello", 24)
    page.until("!document.querySelector('#timings').hidden")
    server.idle()

    def same() -> bool:
        metrics = page_of(server)
        machine, requests = shown(page, "#machine"), shown(page, "#ended")
        prefix = shown(page, "#caches")["Prefix, tokens found"]
        return (
            machine["Steps"].replace(",", "") == f"{value(metrics, 'engine_steps_total'):.0f}"
            and requests["Live"] == f"{value(metrics, 'requests_live'):.0f}"
            and f"of {value(metrics, 'prompt_tokens_total'):.0f} " in prefix.replace(",", "")
        )

    wait_for(same)
    assert int(shown(page, "#machine")["Steps"]) >= 24


def test_a_chat_streams_with_probabilities_and_timings(page: Page) -> None:
    say(page, "hello", 24, logprobs="3")
    page.until("!document.querySelector('#timings').hidden")
    timings = shown(page, "#timings")
    assert timings["Answer"] == "24 tokens"
    assert timings["Ended by"] == "length"
    assert re.fullmatch(r"[\d.]+ tokens/s", timings["Speed"])
    assert page.evaluate("document.querySelectorAll('.turn.assistant .token').length") >= 20
    assert page.evaluate("document.querySelectorAll('#token-rows tr').length") == 24
    say(page, "and again", 4)  # with what was said before
    page.until("document.querySelector('#timings')?.textContent.includes('4 tokens')")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 4


def test_markup_is_shown_as_text(page: Page, server: Server) -> None:
    """In prompts, in answers, in errors, and in what the server says of itself."""
    say(page, MARKUP)
    page.until("!document.querySelector('#timings').hidden")
    assert MARKUP in page.evaluate("document.querySelector('.turn.user').textContent")
    refused(server.generation.Generate, ask("x", 100_000, request_id=MARKUP[:60]))
    page.until("document.querySelector('#errors').textContent.includes('onerror')")
    # An answer with markup, as if a model had written it.
    page.evaluate(f"""(() => {{
        const {{ fetch }} = window, line = JSON.stringify({{ text: {MARKUP!r}, finish: {{}} }}) + "\\n";
        window.fetch = (path, ...rest) =>
            path === "/api/generate" ? Promise.resolve(new Response(line)) : fetch(path, ...rest);
    }})()""")
    say(page, "hello")
    page.until(f"document.querySelector('.turn:last-child').textContent.includes({MARKUP!r})")
    assert page.evaluate("document.querySelectorAll('main img, main script, main b').length") == 0
    assert page.evaluate("document.title") == "Whippet console"


def test_the_policy_stops_what_would_be_put_in_as_markup(chromium: Browser, server: Server) -> None:
    """Inline scripts, foreign scripts and text as markup, had the page a hole for them."""
    one = chromium.page()
    one.open(f"http://{server.metrics}/")
    one.until(READY)
    with pytest.raises(AssertionError, match="TrustedHTML"):
        one.evaluate("document.body.innerHTML = '<b>x</b>'")
    one.evaluate("""(async () => {
        const image = document.createElement("img");
        image.src = "http://127.0.0.1:1/x.png";
        document.body.append(image);
        await fetch("http://127.0.0.1:1/").catch(() => 0);
    })()""")
    wait_for(lambda: bool(one.evaluate("1")) and sum("Content Security Policy" in line for line in one.said) >= 2)
    one.close()


@pytest.mark.parametrize("way", ["button", "key", "leave"])
def test_a_stream_that_is_cancelled_in_the_browser_frees_its_slot(page: Page, server: Server, way: str) -> None:
    say(page, "a long story", 4000)
    server.until(lambda load: load.running == 1)
    page.until("document.querySelector('.turn.assistant p:last-of-type').textContent.length > 2")
    if way == "button":
        page.evaluate("document.querySelector('#cancel').click()")
    elif way == "key":
        page.press("Escape")
    else:
        page.open("about:blank")
    load = server.idle()
    assert load.live_requests == 0
    assert load.generated_tokens < 4000
    if way != "leave":
        page.until("document.querySelector('.failed')?.textContent === 'cancelled'")
        page.until("!document.querySelector('#send').disabled")


def test_a_switch_is_changed_and_shown(page: Page, server: Server) -> None:
    def batching() -> bool:
        found = server.admin.ListOptimizations(admin_pb2.ListOptimizationsRequest(), timeout=60).optimizations
        return {one.name: one.enabled for one in found}["batching"]

    page.evaluate("document.querySelector('#switch-batching').click()")
    wait_for(lambda: not batching())
    server.admin.SetOptimization(admin_pb2.SetOptimizationRequest(name="batching", enabled=True), timeout=60)
    page.until("document.querySelector('#switch-batching').checked")


def test_a_server_with_tokens_asks_for_one(chromium: Browser, serve: Serve, tmp_path: Path) -> None:
    rights = {"all": "[view, generate, admin]", "looks": "[view]", "asks": "[generate]"}
    (tmp_path / "tokens").write_text("".join(entry(token=name, rights=right) for name, right in rights.items()))
    with serve(f"--auth.tokens-file={tmp_path}/tokens") as one:
        page = chromium.page()
        page.open(f"http://{one.metrics}/")
        page.until("document.querySelector('#state').textContent === 'token needed'")

        def use(token: str) -> None:
            page.evaluate("document.querySelector('#identity').open = true; document.querySelector('#token').focus()")
            page.type(token)
            page.press("Enter")

        use("looks")
        page.until(READY)
        assert page.evaluate("document.querySelector('#switch-batching').disabled")
        say(page, "hello")
        page.until("document.querySelector('.failed')?.textContent.includes('right')")
        use("asks")
        page.until("document.querySelector('#state').textContent === 'playground alone'")
        say(page, "hello")
        page.until("!document.querySelector('#timings').hidden")
        use("all")
        page.until(READY)
        page.until("!document.querySelector('#switch-batching').disabled")
        # In memory alone: not in the form, and gone with the page.
        assert page.evaluate("document.querySelector('#token').value") == ""
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        page.open(f"http://{one.metrics}/")
        page.until("document.querySelector('#state').textContent === 'token needed'")
        page.close()


def test_a_server_that_goes_and_comes_is_said(chromium: Browser, serve: Serve) -> None:
    with serve() as one:
        page = chromium.page()
        page.open(f"http://{one.metrics}/")
        page.until(READY)
        one.stop()
        page.until("document.querySelector('#state').textContent === 'not reachable'")
        assert not page.evaluate("document.querySelector('#trouble').hidden")
        page.close()


def test_it_can_be_used_by_keyboard_and_named_by_a_reader(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in nodes if node.get("role", {}).get("value") in CONTROLS and not node["ignored"]]
    assert len(controls) > 20
    assert [node for node in controls if not node.get("name", {}).get("value")] == []
    roles = {node.get("role", {}).get("value") for node in nodes if not node["ignored"]}
    assert {"main", "banner", "log", "switch", "heading", "region", "table", "status"} <= roles
    reached = set()
    for _ in range(60):
        page.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className || 'none'"))
    assert {"skip", "message", "send", "clear", "switch-batching"} <= reached


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_can_be_read_in_the_light_in_the_dark_and_on_400_pixels(
    page: Page, server: Server, dark: bool, width: int, tmp_path: Path
) -> None:
    page.size(width, 900, dark=dark)
    refused(server.generation.Generate, ask("x", 0))
    say(page, "What does <b>bold</b> mean?", 40, logprobs="3")
    page.until("!document.querySelector('#timings').hidden")
    page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    page.until("!document.querySelector('#error-table').hidden")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    least = page.evaluate(CONTRAST)
    assert least[0][0] >= 4.5, least
    page.picture(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
