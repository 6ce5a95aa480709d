"""The theory page in a browser: its functions are those of `flatmin.theory`, and the sliders move what they should."""

import html
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatmin import theory
from flatmin.theory import GaussianSurface
from flatmin_lab.report.pages.theory import theory_page
from tests.support import pages

ANSWER = "const answer = (value) => { const at = document.createElement('pre'); at.id = 'answer';\
 at.textContent = JSON.stringify(value); document.body.append(at); };"
HELPERS = (
    ANSWER
    + """
const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
const drawn = () => ({
  says: document.getElementById("minima-says").textContent, region: document.getElementById("region-says").textContent,
  dot: document.querySelector("#region .dot").outerHTML, state: flatminTheory.state(),
  amp: document.querySelector("#minima path.amp").getAttribute("d"),
  all: [...document.querySelectorAll(".chart")].map((chart) => chart.innerHTML),
  words: [...document.querySelectorAll(".now")].map((now) => now.textContent),
});
const set = async (changes) => {
  for (const [name, value] of Object.entries(changes)) {
    const slider = document.getElementById(name);
    slider.value = value;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  }
  await frame();
  return drawn();
};
const press = async (selector) => { document.querySelector(selector).click(); await frame(); return drawn(); };
"""
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theory") / "theory.html"
    path.write_text(theory_page(), encoding="utf-8")
    return path


def asked(page: Path, script: str) -> Any:
    """What the script answers, in a page that said nothing on the console."""
    seen = pages.visit(page, script)
    assert seen.console == []
    found = re.search(r'<pre id="answer">(.*?)</pre>', seen.dom, flags=re.DOTALL)
    assert found, "the script did not come to its end"
    return json.loads(html.unescape(found[1]))


def computed(page: Path, calls: dict[str, list[tuple[Any, ...]]]) -> dict[str, list[Any]]:
    """Each function of the page at each of its arguments; inf comes as null, which JSON has instead."""
    script = f"const calls = {json.dumps(calls)};{ANSWER}"
    script += "answer(Object.fromEntries(Object.entries(calls).map(([name, all]) =>"
    script += " [name, all.map((given) => flatminTheory[name](...given))])));"
    answers: dict[str, list[Any]] = asked(page, script)
    return answers


def test_the_functions_of_the_page_are_those_of_the_library(page: Path) -> None:
    epsilons, widths, betas, ratios = (
        [0.0, 0.01, 0.25, 1.0],
        [0.0025, 0.09, 1.0],
        [0.02, 0.5, 0.99],
        [0.0, 0.3, 3.0, 800.0],
    )
    offsets = [(0.0, 0.0), (0.3, 0.0), (0.0, 0.3), (0.0, -2.0), (1e-12, 0.2), (-0.4, 0.7), (3.0, 4.0)]
    calls: dict[str, list[tuple[Any, ...]]] = {
        "ampMinimum": [*itertools.product(widths, betas, [1.0, -2.0], epsilons)],
        "gaussian": [*itertools.product([-1.0, 0.2], [0.1], widths, betas, [1.0])],
        "operationalBoundary": [*itertools.product(betas, ratios)],
        "inOperationalRegion": [*itertools.product(betas, [0.25, 1.0, 1.3, 16.0], ratios)],
        "ampExponent": [*itertools.product(offsets, itertools.product(widths, widths), epsilons)],
        "gradientNormPenalty": [*itertools.product([0.0, 0.5, 1.0, 4.0], epsilons, [0.0, 0.05, 0.5], [False, True])],
        "kinkedAmpLoss": [*itertools.product([-1.0, 0.0, 0.1, 2.0], epsilons)],
        "kinkedAdversarialLoss": [*itertools.product([-1.0, 0.0, 0.1, 2.0], [*epsilons, 5.0])],
        "kinkedAmpMinimiser": [(epsilon,) for epsilon in epsilons],
        "maxPooled": [([3.0, 0.0, 3.0, 2.0, 1.0, 2.0, 2.5, -1.0], 0.1, e) for e in (0.0, 0.1, 0.3, 0.35, 9.0)],
    }

    def double(value: Any) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64)

    ours: dict[str, Callable[..., Any]] = {
        "ampMinimum": lambda width, depth, height, e: GaussianSurface(0.0, width, depth, height).amp_minimum(e),
        "gaussian": lambda at, mu, width, depth, height: GaussianSurface(mu, width, depth, height).value(at),
        "operationalBoundary": lambda beta, ratio: theory.operational_boundary(beta, ratio=ratio),
        "inOperationalRegion": lambda beta, r, ratio: theory.in_operational_region(beta, r, ratio=ratio),
        "ampExponent": lambda d, widths, e: GaussianSurface(torch.zeros(2), double(widths).diag(), 1, 0).amp_exponent(
            double(d), e
        ),
        "gradientNormPenalty": lambda norm, e, lr, printed: theory.gradient_norm_penalty(
            norm, epsilon=e, inner_lr=lr, as_printed=printed
        ),
        "kinkedAmpLoss": lambda at, e: theory.kinked_amp_loss(at, epsilon=e),
        "kinkedAdversarialLoss": lambda at, e: theory.kinked_adversarial_loss(at, epsilon=e),
        "kinkedAmpMinimiser": lambda e: theory.kinked_amp_minimiser(epsilon=e),
        "maxPooled": lambda values, spacing, e: theory.max_pooled(double(values), spacing=spacing, epsilon=e),
    }
    for name, theirs in computed(page, calls).items():
        for given, answer in zip(calls[name], theirs, strict=True):
            expected = torch.as_tensor(ours[name](*given), dtype=torch.float64)
            found = double(torch.inf if answer is None else answer)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=f"{name}{given}")


def test_the_page_opens_in_a_state_where_the_two_disagree_and_says_the_numbers_of_the_theorem(page: Path) -> None:
    first = asked(page, HELPERS + "answer(drawn());")
    state = first["state"]
    width, r = state["sigma"] ** 2, 2 ** state["spread"]
    assert theory.in_operational_region(state["beta"], r, ratio=state["epsilon"] ** 2 / (2 * width))
    assert "ERM takes minimum 1" in first["says"]
    assert "AMP takes minimum 2:" in first["says"]
    for surface in (GaussianSurface(0.0, width, 1.0, 1.0), GaussianSurface(0.0, r * width, state["beta"], 1.0)):
        assert f"= {surface.amp_minimum(state['epsilon']):.2f} around" in first["says"].replace("\u00a0", " ")
    assert "full" in first["dot"]


def test_moving_a_slider_moves_sentence_dot_and_curves(page: Path) -> None:
    script = """(async () => {
      const first = drawn();
      const small = await set({ epsilon: 0.05 });
      const shallow = await set({ epsilon: 0.25, beta: 0.1 });
      const sharp = await set({ beta: 0.75, spread: -1 });
      const moved = await set({ spread: 3, along: 0.2, across: -0.3, zeta: 0.6 });
      const back = await press("[data-preset=start]");
      answer({ first, small, shallow, sharp, moved, back });
    })();"""
    seen = asked(page, HELPERS + script)
    first = seen["first"]
    for name in ("small", "shallow", "sharp"):
        assert "AMP takes minimum 1 too" in seen[name]["says"], name
        assert "open" in seen[name]["dot"], name
        assert seen[name]["says"] != first["says"]
    assert seen["small"]["amp"] != first["amp"]
    assert "no flatness is enough" in seen["shallow"]["region"]
    assert [a != b for a, b in zip(seen["moved"]["all"], first["all"], strict=True)] == [False] * 2 + [True] * 3 + [
        False
    ]
    assert seen["back"] == first


@pytest.mark.parametrize(
    ("preset", "says"),
    [("disagree", "AMP takes minimum 2:"), ("zero", "AMP takes minimum 1 too"), ("large", "That is underfitting")],
)
def test_a_preset_shows_what_its_button_says(page: Path, preset: str, says: str) -> None:
    seen = asked(page, f'{HELPERS}(async () => answer(await press("[data-preset={preset}]")))();')
    assert says in seen["says"]


def test_a_click_on_the_map_sets_depth_and_flatness(page: Path) -> None:
    script = """(async () => {
      const place = (selector) => document.querySelector(selector).getBoundingClientRect();
      const box = place("#region svg");
      const at = { clientX: box.left + box.width * 0.6, clientY: box.top + box.height * 0.3, bubbles: true };
      document.querySelector("#region").dispatchEvent(new MouseEvent("click", at));
      await frame();
      const dot = place("#region .dot");
      answer({ ...drawn(), jump: place("#region svg").top - box.top,
        off: [dot.x + dot.width / 2 - at.clientX, dot.y + dot.height / 2 - at.clientY],
        sliders: [document.getElementById("beta").value, document.getElementById("spread").value] });
    })();"""
    seen = asked(page, HELPERS + script)
    assert seen["jump"] == 0  # a sentence above that grew would push the map away under the finger
    assert all(abs(off) < 6 for off in seen["off"])  # within a step of the sliders
    assert [float(value) for value in seen["sliders"]] == [seen["state"]["beta"], seen["state"]["spread"]]


def test_the_ends_of_all_sliders_draw_without_an_error_and_without_nan(page: Path) -> None:
    script = """(async () => {
      const names = ["epsilon", "sigma", "beta", "spread", "along", "across", "zeta"];
      const seen = [];
      for (let ends = 0; ends < 128; ends++) {
        const one = (name, i) => [name, document.getElementById(name)[ends & (1 << i) ? "max" : "min"]];
        for (const [name, value] of names.map(one)) {
          const slider = document.getElementById(name);
          slider.value = value;
          slider.dispatchEvent(new Event("input"));
        }
        if (ends % 3 === 0) await frame();
        seen.push(/NaN|Infinity|undefined/.test(document.querySelector("body").innerHTML.split("<script")[0]));
      }
      answer(seen);
    })();"""
    assert not any(asked(page, HELPERS + script))


@pytest.mark.parametrize("width", [320, 400, 800])
def test_a_narrow_page_has_no_horizontal_scroll_and_letters_that_can_be_read(tmp_path: Path, width: int) -> None:
    frame = tmp_path / "frame.html"
    held = f'<iframe width="{width}" height="900" srcdoc="{html.escape(theory_page())}"></iframe>'
    frame.write_text(f"<html><head></head><body>{held}</body></html>", encoding="utf-8")
    script = (
        ANSWER
        + """document.querySelector("iframe").onload = (event) => {
      const inside = event.target.contentDocument;
      const letters = [...inside.querySelectorAll(".chart svg text")];
      const wide = letters.filter((text) => {
        const box = text.getBoundingClientRect();
        return box.left < -0.5 || box.right > inside.documentElement.clientWidth + 0.5;
      });
      const height = (text) => text.getBoundingClientRect().height;
      answer({ scroll: inside.documentElement.scrollWidth - inside.documentElement.clientWidth,
        clipped: wide.map((text) => text.textContent), smallest: Math.min(...letters.map(height)) });
    };"""
    )
    seen = asked(frame, script)
    assert seen["scroll"] == 0
    assert seen["clipped"] == []
    assert seen["smallest"] >= 11


def test_the_page_is_one_file_that_asks_nobody() -> None:
    text = theory_page()
    assert re.findall(r"(?:src|href)=[\"'](?!#)([^\"']*)", text) == ["https://arxiv.org/abs/2010.04925"]
    assert not re.search(r"\bimport\b|fetch\(|XMLHttpRequest|@import|url\((?!#)", text)
    assert set(re.findall(r"https?://[\w./]+", text)) == {
        "https://arxiv.org/abs/2010.04925",
        "http://www.w3.org/2000/svg",
    }


def test_every_slider_has_a_label_and_every_name_is_used_once() -> None:
    text = theory_page().split("<script>", maxsplit=1)[0]
    names = re.findall(r'\bid="([\w-]+)"', text)
    assert len(names) == len(set(names))
    sliders = re.findall(r'<input type="range" id="(\w+)"', text)
    assert sliders == ["epsilon", "sigma", "beta", "spread", "along", "across", "zeta"]
    assert all(f'<label class="slider" for="{name}">' in text for name in sliders)


def test_the_script_leaves_one_name_behind(page: Path) -> None:
    script = ANSWER + "answer(Object.keys(window).filter((name) => !before.includes(name)));"
    text = page.read_text(encoding="utf-8").replace(
        "<head>", "<head><script>var before = Object.keys(window);</script>"
    )
    other = page.with_name("other.html")
    other.write_text(text, encoding="utf-8")
    assert set(asked(other, script)) <= {"flatminTheory", "onerror", "requestAnimationFrame", "before"}


def test_an_error_in_a_page_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "broken.html"
    path.write_text("<html><head></head><body></body></html>", encoding="utf-8")
    seen = pages.visit(path, 'console.error("one"); missing();')
    assert seen.console[0] == "one"
    assert any("missing is not defined" in said for said in seen.console)
