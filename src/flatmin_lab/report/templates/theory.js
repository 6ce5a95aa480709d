// The theorems and their figures. The first part is flatmin/theory in another language, and is tested against it;
// the second draws. One state, one draw(): every slider changes the state and everything is drawn again.
"use strict";
window.flatminTheory = (() => {
  // ---- the theorems --------------------------------------------------------------------------------------------

  const gaussian = (theta, mu, variance, A, C) => C - A * Math.exp(-((theta - mu) ** 2) / (2 * variance));

  const ampMinimum = (variance, A, C, epsilon) => C - A * Math.exp(-(epsilon ** 2) / (2 * variance));

  const inOperationalRegion = (beta, r, ratio) => Math.log(beta) + (ratio * (r - 1)) / r > 0;

  const operationalBoundary = (beta, ratio) => {
    const left = ratio + Math.log(beta);
    return left > 0 ? ratio / left : Infinity;
  };

  // The largest value among the grid points within epsilon; at the ends the window stops with the grid.
  const maxPooled = (values, spacing, epsilon) => {
    const reach = Math.min(Math.floor((epsilon / spacing) * (1 + 1e-12)), values.length - 1);
    const falling = []; // places of a falling row of values in the window: the first is the largest
    const pooled = new Array(values.length);
    for (let i = 0, first = 0; i < values.length + reach; i++) {
      if (i < values.length) {
        while (falling.length > first && values[falling[falling.length - 1]] <= values[i]) falling.pop();
        falling.push(i);
      }
      if (falling[first] < i - 2 * reach) first++;
      if (i >= reach) pooled[i - reach] = values[falling[first]];
    }
    return pooled;
  };

  // Two dimensions, in the basis of κ's eigenvectors: d = θ − μ. See GaussianSurface._worst for the equation in t.
  const worst = (d, variances, epsilon) => {
    const narrowest = Math.min(...variances);
    const share = variances.map((variance) => narrowest / variance);
    const gap = variances.map((variance) => (variance - narrowest) / variance);
    if (epsilon === 0) return [0, 0];
    const step = (t) => d.map((part, i) => (part === 0 ? 0 : (share[i] * part) / epsilon / (t + gap[i])));
    let low = Math.log(1e-200);
    let high = Math.log(Math.max(Math.hypot(d[0], d[1]) / epsilon, 1e-200));
    let y = step(1e-200);
    if (Math.hypot(...y) < 1) {
      const n = variances.indexOf(narrowest); // the hard case: made long enough in the narrowest direction
      y[n] = (d[n] < 0 ? -1 : 1) * Math.sqrt(1 - y[1 - n] ** 2);
    } else {
      for (let i = 0; i < 100; i++) {
        const middle = (low + high) / 2;
        if (Math.hypot(...step(Math.exp(middle))) > 1) low = middle;
        else high = middle;
      }
      y = step(Math.exp(high));
    }
    const length = Math.hypot(...y);
    return y.map((part) => (epsilon * part) / length);
  };

  const exponent = (d, variances) => d.reduce((sum, part, i) => sum + part ** 2 / (2 * variances[i]), 0);

  const ampExponent = (d, variances, epsilon) => {
    const step = worst(d, variances, epsilon);
    return exponent(d.map((part, i) => part + step[i]), variances);
  };

  const gradientNormPenalty = (norm, epsilon, innerLr, asPrinted = false) => {
    const inside = innerLr === 0 ? norm : Math.min(norm, epsilon / innerLr);
    return innerLr * inside * (asPrinted ? norm : norm - inside / 2);
  };

  const kinked = (z) => Math.max(z, -2 * z);
  const kinkedAmpLoss = (theta, epsilon) => Math.max(kinked(theta - epsilon), kinked(theta + epsilon));
  const kinkedAdversarialLoss = (theta, epsilon) =>
    Math.max(kinked(theta * (1 - epsilon)), kinked(theta * (1 + epsilon)));
  const kinkedAmpMinimiser = (epsilon) => epsilon / 3;

  // ---- the state -----------------------------------------------------------------------------------------------

  const START = { epsilon: 0.25, sigma: 0.15, beta: 0.75, spread: 3, along: 0, across: 0, zeta: 0.2 };
  const PRESETS = {
    start: START,
    disagree: { epsilon: 0.3, sigma: 0.12, beta: 0.8, spread: 3.5 },
    zero: { epsilon: 0.01, sigma: 0.15, beta: 0.75, spread: 3 },
    large: { epsilon: 0.6, sigma: 0.25, beta: 0.3, spread: 1.2 },
  };
  const state = { ...START };
  const flatness = () => 2 ** state.spread; // r: its slider moves its logarithm
  const ratio = () => state.epsilon ** 2 / (2 * state.sigma ** 2);

  // ---- drawing -------------------------------------------------------------------------------------------------

  const element = (id) => document.getElementById(id);
  const two = (number, digits = 2) => number.toFixed(digits).replace("-", "−");
  const small = (number) => (number === 0 || number >= 0.01 ? two(number) : number.toPrecision(1));
  const say = (id, html) => {
    const kept = html.replaceAll(" = ", "\u00a0=\u00a0"); // an equation is not broken over two lines
    if (element(id).innerHTML !== kept) element(id).innerHTML = kept;
  };

  // Axes over a box of the page's own width, so that letters keep their size on a phone.
  const chart = (id, { x, y, height, left = 44, top = 14, bottom = 40, right = 12, square = false }) => {
    const holder = element(id);
    const width = Math.max(holder.clientWidth, 200);
    const tall = square ? width : height;
    const inner = { left, right: width - right, top, bottom: tall - bottom };
    const scale = (value, [low, high], from, to) => from + ((value - low) / (high - low)) * (to - from);
    return {
      holder, width, tall, inner, parts: [],
      px: (value) => scale(value, x, inner.left, inner.right),
      py: (value) => scale(value, y, inner.bottom, inner.top),
      back: (event) => {
        const box = holder.firstElementChild.getBoundingClientRect();
        return [
          scale(event.clientX - box.left, [inner.left, inner.right], ...x),
          scale(event.clientY - box.top, [inner.bottom, inner.top], ...y),
        ];
      },
    };
  };

  const put = (c, ...parts) => c.parts.push(...parts);
  const text = (x, y, words, { anchor = "middle", kind = "" } = {}) =>
    `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" text-anchor="${anchor}" class="${kind}">${words}</text>`;
  const segment = (x1, y1, x2, y2, kind) =>
    `<line x1="${x1.toFixed(1)}" y1="${y1.toFixed(1)}" x2="${x2.toFixed(1)}" y2="${y2.toFixed(1)}" class="${kind}"/>`;
  const line = (c, points, kind) => {
    const path = points.map(([a, b]) => `${c.px(a).toFixed(1)} ${c.py(b).toFixed(1)}`).join("L");
    return `<path d="M${path}" class="${kind}" clip-path="url(#clip-${c.holder.id})"/>`;
  };
  const circle = (x, y, kind) => `<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="5" class="dot ${kind}"/>`;
  const box = (x, y, kind) =>
    `<rect x="${(x - 7).toFixed(1)}" y="${(y - 7).toFixed(1)}" width="14" height="14" class="dot ${kind}"/>`;
  const grip = (x, y) => `<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="26" class="grip"/>`; // for a finger

  const axes = (c, { xs, ys, xName, yName }) => {
    const { left, right, top, bottom } = c.inner;
    for (const [value, words] of ys) {
      put(c, segment(left, c.py(value), right, c.py(value), "grid"));
      put(c, text(left - 7, c.py(value) + 4.5, words, { anchor: "end", kind: "soft" }));
    }
    for (const [value, words] of xs) {
      put(c, segment(c.px(value), bottom, c.px(value), bottom + 4, "axis"));
      put(c, text(c.px(value), bottom + 18, words, { kind: "soft" }));
    }
    put(c, segment(left, bottom, right, bottom, "axis"));
    put(c, text((left + right) / 2, c.tall - 4, xName));
    put(c, text(2, top - 15, yName, { anchor: "start" }));
  };
  const ticks = (...values) => values.map((value) => [value, String(value).replace("-", "−")]);
  const evenly = (high, count) => {
    const raw = high / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let i = 0; i * step <= high * 1.001; i++) found.push(Number((i * step).toPrecision(3)));
    return ticks(...found);
  };
  const range = (low, high, count) => Array.from({ length: count + 1 }, (_, i) => low + ((high - low) * i) / count);

  // Written into the one <svg> of the holder, which stays, so that a dragging finger keeps what it holds.
  const show = (c, label) => {
    if (!c.holder.firstElementChild) {
      c.holder.append(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
      c.holder.firstElementChild.setAttribute("role", "img");
    }
    const { left, right, top, bottom } = c.inner;
    const svg = c.holder.firstElementChild;
    svg.setAttribute("viewBox", `0 0 ${c.width} ${c.tall}`);
    svg.setAttribute("aria-label", label);
    svg.innerHTML =
      `<clipPath id="clip-${c.holder.id}"><rect x="${left}" y="${top - 3}" width="${right - left}"` +
      ` height="${bottom - top + 6}"/></clipPath>${c.parts.join("")}`;
    return c;
  };

  // ---- 1. two minima -------------------------------------------------------------------------------------------

  const PLACES = [-1.5, 1.5];
  const SPACING = 0.0025; // ε moves in steps of four spacings, so the window is exact

  const drawMinima = () => {
    const { epsilon, sigma, beta } = state;
    const variances = [sigma ** 2, flatness() * sigma ** 2];
    const depths = [1, beta];
    const [low, high, margin] = [-3, 4, 1]; // sampled a radius beyond what is shown
    const grid = range(low - margin, high + margin, Math.round((high - low + 2 * margin) / SPACING));
    const risk = grid.map((theta) => Math.min(...PLACES.map((mu, i) => gaussian(theta, mu, variances[i], depths[i], 1))));
    const pooled = maxPooled(risk, SPACING, epsilon);
    const at = (values, theta) => values[Math.round((theta - low + margin) / SPACING)];
    const theory = PLACES.map((_, i) => ampMinimum(variances[i], depths[i], 1, epsilon));
    const taken = inOperationalRegion(beta, flatness(), ratio()) ? 1 : 0;

    const c = chart("minima", { x: [low, high], y: [0, 1], height: 300, top: 32 });
    axes(c, { xs: ticks(-3, -2, -1, 0, 1, 2, 3, 4), ys: ticks(0, 0.5, 1), xName: "θ", yName: "risk" });
    const points = (values) => grid.map((theta, i) => [theta, values[i]]);
    const shown = (values) => points(values).filter(([theta], i) => i % 3 === 0 && theta >= low && theta <= high);
    put(c, line(c, shown(pooled), "amp"), line(c, shown(risk), "erm"));
    PLACES.forEach((mu, i) => {
      const [level, x] = [c.py(at(pooled, mu)), c.px(mu)];
      const ends = [c.px(mu - epsilon), c.px(mu + epsilon)];
      put(c, segment(ends[0], level, ends[1], level, "reach"));
      for (const end of ends) put(c, segment(end, level - 5, end, level + 5, "reach"));
      put(c, box(x, level, `of-amp ${i === taken ? "full" : "open"}`));
      put(c, circle(x, c.py(at(risk, mu)), `of-erm ${i === 0 ? "full" : "open"}`)); // inside the box where both are one
      put(c, text(x, c.inner.top - 15, `minimum ${i + 1}`));
    });
    const formula = (i) => `1 − ${two(depths[i])}·exp(−${small(epsilon ** 2 / (2 * variances[i]))})`;
    const digits = Math.abs(theory[0] - theory[1]) < 0.02 ? 4 : 2;
    const overlap = PLACES.some((mu, i) => Math.abs(at(pooled, mu) - theory[i]) > 0.005);
    say("minima-says",
      `<b>ERM takes minimum 1</b>: its risk is ${two(0)}, that of minimum 2 is ${two(1 - beta)}. ` +
      `<b>AMP takes minimum ${taken + 1}</b>${taken ? "" : " too"}: the worst risk within ε = ${two(epsilon)} is ` +
      `<span class="formula">${formula(0)}</span> = ${two(theory[0], digits)} around minimum 1 and ` +
      `<span class="formula">${formula(1)}</span> = ${two(theory[1], digits)} around minimum 2.` +
      (taken && beta < 0.5 ? ` That is underfitting: the risk there is ${two(1 - beta)}.` : "") +
      (overlap ? " (Here the two minima run into each other: the AMP risk as drawn is lower than the theorem’s.)" : ""));
    show(c, "The risk with two minima, and the AMP risk above it");
  };

  // ---- 2. the operational region -------------------------------------------------------------------------------

  const LOWEST = -2, HIGHEST = 4; // of the logarithm of r
  let regionChart = null;

  const drawRegion = () => {
    const here = ratio();
    const c = chart("region", { x: [0, 1], y: [LOWEST, HIGHEST], height: 350, top: 44 });
    const names = ["¼", "½", "1", "2", "4", "8", "16"].map((words, i) => [LOWEST + i, words]);
    axes(c, { xs: ticks(0, 0.2, 0.4, 0.6, 0.8, 1), ys: names, xName: "β, depth of 2 over that of 1", yName: "r" });
    const edge = (value) => range(0, HIGHEST, 200).map((power) => [Math.exp(-value * (1 - 2 ** -power)), power]);
    const points = edge(here);
    if (here > 0) {
      const corner = [[1, HIGHEST], [1, 0]];
      put(c, line(c, [...points, ...corner], "region"));
    }
    for (const [value, words] of [[0.1, "0.1"], [0.5, "0.5"], [2, "2"]]) {
      put(c, line(c, edge(value), "thin"));
      put(c, text(c.px(Math.exp(-value * (1 - 2 ** -HIGHEST))), c.inner.top - 6, words, { kind: "soft" }));
    }
    put(c, text(c.inner.left, c.inner.top - 25, "ε²/2σ₁² =", { anchor: "start", kind: "soft" }));
    if (here > 0) put(c, line(c, points, "amp"));
    if (here > 0.7) put(c, text(c.px(0.97), c.py(3.35), "AMP takes minimum 2", { anchor: "end" }));
    put(c, text(c.px(0.03), c.py(-1.5), "both take minimum 1", { anchor: "start" }));
    const inside = inOperationalRegion(state.beta, flatness(), here);
    put(c, circle(c.px(state.beta), c.py(state.spread), `of-point ${inside ? "full" : "open"}`));
    put(c, grip(c.px(state.beta), c.py(state.spread)));
    const bound = operationalBoundary(state.beta, here);
    say("region-says",
      `ε²/2σ<sub>1</sub>² = <b>${two(here)}</b>. With β = ${two(state.beta)}, ` +
      (bound === Infinity
        ? `no flatness is enough: β would have to be above exp(−${two(here)}) = ${two(Math.exp(-here))}.`
        : `minimum 2 must be more than ${two(bound)} times as flat; it is ${two(flatness())} times: ` +
          `<b>${inside ? "inside, AMP takes minimum 2" : "outside, AMP takes minimum 1"}</b>.`));
    regionChart = show(c, "The operational region of AMP over β and r");
    c.holder.firstElementChild.classList.add("hand");
  };

  // ---- 3. two dimensions ---------------------------------------------------------------------------------------

  const TILT = Math.PI / 6;
  const [COS, SIN] = [Math.cos(TILT), Math.sin(TILT)];
  const outward = ([a, b]) => [a * COS - b * SIN, a * SIN + b * COS]; // from κ's axes to the picture's
  let surfaceChart = null;

  const drawSurface = () => {
    const { epsilon, sigma } = state;
    const variances = [sigma ** 2, flatness() * sigma ** 2];
    const d = [state.along, state.across];
    const step = worst(d, variances, epsilon);
    const far = d.map((part, i) => part + step[i]);
    const half = Math.max(epsilon + 0.75, Math.min(1.4, 3.2 * Math.sqrt(Math.max(...variances)))); // every ball fits
    const c = chart("surface", { x: [-half, half], y: [-half, half], square: true, left: 4, right: 4, top: 4, bottom: 4 });
    const circling = range(0, 2 * Math.PI, 120).map((a) => [Math.cos(a), Math.sin(a)]);
    const ellipse = (level, kind) => {
      const axes = variances.map((variance) => Math.sqrt(2 * level * variance));
      return line(c, circling.map(([a, b]) => outward([axes[0] * a, axes[1] * b])), kind);
    };
    for (const widths of [3, 2, 1]) put(c, ellipse(widths ** 2 / 2, "contour"));
    put(c, ellipse(exponent(far, variances), "touching"));
    const [x, y] = outward(d), [wx, wy] = outward(far);
    const radius = Math.abs(c.px(epsilon) - c.px(0));
    put(c, line(c, circling.map(([a, b]) => [x + epsilon * a, y + epsilon * b]), "ball"));
    put(c, segment(c.px(x), c.py(y), c.px(wx), c.py(wy), "reach"));
    const [mx, my] = [c.px(0), c.py(0)];
    put(c, segment(mx - 7, my, mx + 7, my, "axis"), segment(mx, my - 7, mx, my + 7, "axis"));
    put(c, box(c.px(wx), c.py(wy), "of-amp full"), circle(c.px(x), c.py(y), "of-point full"));
    const atMu = Math.hypot(...d) < 1e-9;
    const side = wx < x ? -1 : 1; // where the worst point lies; θ's letter is on the other side, or below a small ball
    const beside = radius > (atMu ? 60 : 30);
    const name = atMu ? "θ = μ" : "θ";
    if (beside) put(c, text(c.px(x) - 12 * side, c.py(y) + 5, name, { anchor: side > 0 ? "end" : "start", kind: "halo" }));
    else put(c, text(c.px(x), c.py(y) + Math.max(radius, 8) + 18, name, { kind: "halo" }));
    if (Math.hypot(...d) > epsilon + 0.1) put(c, text(mx, my + 22, "μ", { kind: "halo" }));
    if (epsilon > 0) {
      const room = side > 0 ? c.inner.right - c.px(wx) : c.px(wx) - c.inner.left;
      const [dx, dy] = room > 60 ? [13 * side, (wy > y ? -4 : 12)] : [0, wy > y ? -14 : 24];
      const anchor = ["end", "middle", "start"][Math.sign(dx) + 1];
      put(c, text(c.px(wx) + dx, c.py(wy) + dy, "worst", { anchor, kind: "halo" }));
    }
    const { left, right, top, bottom } = c.inner;
    put(c, `<rect x="${left}" y="${top}" width="${right - left}" height="${bottom - top}" class="frame"/>`);
    put(c, grip(c.px(x), c.py(y)));
    const value = (e) => two(1 - Math.exp(-e));
    const least = ampMinimum(Math.min(...variances), 1, 1, epsilon);
    say("surface-says",
      `The risk at θ is ${value(exponent(d, variances))}, ` +
      `the worst in the ball is <b>${value(exponent(far, variances))}</b>. ` +
      `The least possible, at θ = μ by Theorem 1, is <span class="formula">1 − exp(−ε²/2σ²)</span> = <b>${two(least)}</b>, with ` +
      `σ² = ${Math.min(...variances).toPrecision(2)} the smaller of the two variances ` +
      `${variances.map((v) => v.toPrecision(2)).join(" and ")}.`);
    surfaceChart = show(c, "Contours of an inverted Gaussian, the ball around θ and its worst point");
    c.holder.firstElementChild.classList.add("hand");
  };

  // ---- 4. the penalty ------------------------------------------------------------------------------------------

  const drawPenalty = () => {
    const { epsilon, zeta } = state;
    const knee = epsilon / zeta;
    const longest = 4;
    const norms = range(0, longest, 400);
    const value = (printed) => norms.map((n) => [n, gradientNormPenalty(n, epsilon, zeta, printed)]);
    const inside = norms.filter((n) => n < Math.min(knee, longest));
    const edge = Math.min(knee, longest);
    const beyond = knee < longest ? [[knee, epsilon], [longest, epsilon]] : [];
    const slopes = [
      [...inside.map((n) => [n, zeta * n]), [edge, zeta * edge], ...beyond],
      [...inside.map((n) => [n, 2 * zeta * n]), [edge, 2 * zeta * edge], ...beyond],
    ];
    const frames = [
      ["penalty", value(false), value(true), "Ω", "The penalty Ω over the length of the gradient"],
      ["slope", ...slopes, "slope of Ω", "The slope of Ω over the length of the gradient"],
    ];
    for (const [id, amp, printed, name, label] of frames) {
      const high = 1.08 * Math.max(...amp.map((p) => p[1]), ...printed.map((p) => p[1]), 0.1);
      const c = chart(id, { x: [0, longest], y: [0, high], height: 240, top: 32, left: 46 });
      axes(c, { xs: ticks(0, 1, 2, 3, 4), ys: evenly(high, 4), xName: "‖∇J‖", yName: name });
      if (knee < longest) {
        put(c, segment(c.px(knee), c.inner.top, c.px(knee), c.inner.bottom, "thin"));
        const [dx, anchor] = knee > 3 ? [-5, "end"] : [5, "start"];
        put(c, text(c.px(knee) + dx, c.inner.bottom - 8, "ε/ζ", { anchor, kind: "soft halo" }));
      }
      put(c, line(c, amp, "amp"), line(c, printed, "printed"));
      show(c, label);
    }
    say("penalty-says", epsilon === 0
      ? "With ε = 0 there is no step up and no penalty: AMP is ordinary training."
      : `The step is cut to length ε = ${two(epsilon)} where the gradient is longer than <b>ε/ζ = ${two(knee)}</b>. ` +
        `Below, AMP’s Ω is ${small(zeta / 2)}·‖∇J‖²; above, it is ${two(epsilon)}·‖∇J‖ − ` +
        `${small(epsilon ** 2 / (2 * zeta))}, which continues it without a kink.`);
  };

  // ---- 5. the kinked loss --------------------------------------------------------------------------------------

  const drawKinked = () => {
    const { epsilon } = state;
    const c = chart("kinked", { x: [-1.2, 1.2], y: [0, 3], height: 300, top: 32 });
    axes(c, { xs: ticks(-1, -0.5, 0, 0.5, 1), ys: ticks(0, 1, 2, 3), xName: "θ", yName: "loss" });
    const thetas = [...range(-1.2, 1.2, 240), 0, kinkedAmpMinimiser(epsilon)].sort((a, b) => a - b);
    const best = kinkedAmpMinimiser(epsilon);
    put(c, segment(c.px(best), c.py(kinkedAmpLoss(best, epsilon)), c.px(best), c.inner.bottom, "thin"));
    put(c, line(c, thetas.map((t) => [t, kinkedAmpLoss(t, epsilon)]), "amp"));
    put(c, line(c, thetas.map((t) => [t, kinkedAdversarialLoss(t, epsilon)]), "adversarial"));
    put(c, line(c, thetas.map((t) => [t, kinked(t)]), "erm"));
    put(c, box(c.px(best), c.py(kinkedAmpLoss(best, epsilon)), "of-amp full"), circle(c.px(0), c.py(0), "of-erm full"));
    say("kinked-says",
      `ERM and adversarial training stay at <b>θ = 0</b>, with loss 0. The AMP loss is lowest at ` +
      `<b>θ = ε/3 = ${two(best)}</b>, where the worst loss is 4ε/3 = ${two(kinkedAmpLoss(best, epsilon))}; ` +
      `at θ = 0 it would be 2ε = ${two(kinkedAmpLoss(0, epsilon))}.`);
    show(c, "The kinked loss, its AMP loss and its adversarial loss");
  };

  // ---- together ------------------------------------------------------------------------------------------------

  const SLIDERS = ["epsilon", "sigma", "beta", "spread", "along", "across", "zeta"];

  const draw = () => {
    for (const name of SLIDERS) {
      const slider = element(name);
      if (Number(slider.value) !== state[name]) slider.value = state[name];
      const words = two(name === "spread" ? flatness() : state[name]);
      element(`${name}-value`).textContent = words;
      slider.setAttribute("aria-valuetext", words);
    }
    drawMinima();
    drawRegion();
    drawSurface();
    drawPenalty();
    drawKinked();
  };

  let asked = false; // at most one drawing a frame
  const change = (changes) => {
    Object.assign(state, changes);
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };

  // A value that the slider of that name can have.
  const settled = (name, value) => {
    const { min, max, step } = element(name);
    const steps = Math.round((value - min) / step);
    return Number(Math.min(Math.max(Number(min) + steps * step, min), max).toFixed(4));
  };

  const draggable = (id, moved) => {
    const holder = element(id);
    const move = (event) => {
      moved(event);
      event.preventDefault();
    };
    holder.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" && !event.target.classList.contains("grip")) return; // a finger may be scrolling
      holder.setPointerCapture(event.pointerId);
      move(event);
    });
    holder.addEventListener("click", moved);
    holder.addEventListener("pointermove", (event) => holder.hasPointerCapture(event.pointerId) && move(event));
  };

  const start = () => {
    for (const name of SLIDERS) {
      element(name).addEventListener("input", (event) => change({ [name]: Number(event.target.value) }));
    }
    for (const button of document.querySelectorAll("[data-preset]")) {
      button.addEventListener("click", () => change(PRESETS[button.dataset.preset]));
    }
    element("home").addEventListener("click", () => change({ along: 0, across: 0 }));
    draggable("region", (event) => {
      const [beta, power] = regionChart.back(event);
      change({ beta: settled("beta", beta), spread: settled("spread", power) });
    });
    draggable("surface", (event) => {
      const [x, y] = surfaceChart.back(event);
      change({ along: settled("along", x * COS + y * SIN), across: settled("across", y * COS - x * SIN) });
    });
    window.addEventListener("resize", () => change({}));
    draw();
  };
  start();

  return Object.freeze({
    gaussian, ampMinimum, inOperationalRegion, operationalBoundary, maxPooled, worst, exponent, ampExponent,
    gradientNormPenalty, kinked, kinkedAmpLoss, kinkedAdversarialLoss, kinkedAmpMinimiser, state: () => ({ ...state }),
  });
})();
