// The loss around the weights as surfaces that can be turned: canvas, no library. Those of one page turn together.
"use strict";
(() => {
  const colours = JSON.parse(document.getElementById("colours").textContent);
  const start = { yaw: -0.7, pitch: 0.55 };
  const view = { ...start };
  const box = document.querySelector("input.logarithmic");
  const surfaces = [...document.querySelectorAll("figure.surface")].map((figure) => ({
    canvas: figure.querySelector("canvas"),
    ...JSON.parse(figure.querySelector("script").textContent),
  }));
  if (!surfaces.length) return;

  // one scale for all: from the lowest loss to what shows the valley, four fifths of the points
  const finite = surfaces.flatMap((s) => s.plane.flat()).filter((v) => v !== null).sort((a, b) => a - b);
  const low = finite.length ? finite[0] : 0;
  const high = finite.length ? Math.max(finite[Math.floor(0.8 * (finite.length - 1))], low + 1e-9) : 1;
  const floor = Math.max(low, 1e-4);

  function height(value) {
    if (value === null) return 1;
    const share = box.checked
      ? Math.log(Math.max(value, floor) / floor) / Math.log(Math.max(high / floor, 1 + 1e-9))
      : (value - low) / (high - low);
    return Math.min(1, Math.max(0, share));
  }

  function lossAt(share) {
    return box.checked ? floor * Math.pow(high / floor, share) : low + share * (high - low);
  }

  // x and y from −1 to 1, z from 0 to 1, turned, then seen from a little way off
  function project(x, y, z, size) {
    const c = Math.cos(view.yaw), s = Math.sin(view.yaw);
    const cp = Math.cos(view.pitch), sp = Math.sin(view.pitch);
    const across = c * x - s * y, away = s * x + c * y, up = 1.1 * z - 0.5;
    const depth = away * cp - up * sp, rise = away * sp + up * cp;
    const near = 5 / (5 + depth);
    return { x: size.w / 2 + across * near * size.unit, y: size.h * 0.44 - rise * near * size.unit, depth };
  }

  function draw(surface) {
    const { canvas, plane, axis } = surface;
    const ratio = window.devicePixelRatio || 1;
    const w = canvas.clientWidth, h = canvas.clientHeight;
    if (!w || !h) return;
    canvas.width = Math.round(w * ratio);
    canvas.height = Math.round(h * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, w, h);
    const size = { w, h, unit: Math.min(w / 3.7, h / 2.75) };
    const ink = getComputedStyle(canvas).color;
    const n = axis.length, place = (i) => (2 * i) / (n - 1) - 1;
    frame(pen, size, ink);
    const points = plane.map((row, j) => row.map((v, i) => project(place(i), place(j), height(v), size)));
    const pieces = [];
    for (let j = 0; j + 1 < n; j++) {
      for (let i = 0; i + 1 < n; i++) {
        const corners = [points[j][i], points[j][i + 1], points[j + 1][i + 1], points[j + 1][i]];
        const values = [plane[j][i], plane[j][i + 1], plane[j + 1][i + 1], plane[j + 1][i]];
        const mean = values.reduce((sum, v) => sum + height(v), 0) / 4;
        pieces.push({ corners, mean, depth: corners.reduce((sum, p) => sum + p.depth, 0) });
      }
    }
    pieces.sort((a, b) => b.depth - a.depth);
    pen.lineJoin = "round";
    for (const piece of pieces) {
      pen.beginPath();
      piece.corners.forEach((p, k) => (k ? pen.lineTo(p.x, p.y) : pen.moveTo(p.x, p.y)));
      pen.closePath();
      pen.fillStyle = colours[Math.round(piece.mean * (colours.length - 1))];
      pen.fill();
      pen.strokeStyle = "rgba(128,128,128,.45)";
      pen.lineWidth = 0.5;
      pen.stroke();
    }
    scale(pen, size, ink);
    canvas.dataset.drawn = `${view.yaw.toFixed(3)} ${view.pitch.toFixed(3)} ${box.checked}`;
  }

  function frame(pen, size, ink) {
    pen.strokeStyle = ink;
    pen.globalAlpha = 0.45;
    pen.lineWidth = 1;
    const base = [[-1, -1], [1, -1], [1, 1], [-1, 1]].map(([x, y]) => project(x, y, 0, size));
    pen.beginPath();
    base.forEach((p, k) => (k ? pen.lineTo(p.x, p.y) : pen.moveTo(p.x, p.y)));
    pen.closePath();
    pen.stroke();
    pen.globalAlpha = 1;
  }

  // the height's scale stands at the corner that is furthest to the left, the names of x and y at the nearest sides
  function scale(pen, size, ink) {
    const corners = [[-1, -1], [1, -1], [1, 1], [-1, 1]];
    const [x, y] = corners.reduce((a, b) => (project(...a, 0, size).x < project(...b, 0, size).x ? a : b));
    pen.strokeStyle = pen.fillStyle = ink;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const foot = project(x, y, 0, size), top = project(x, y, 1, size);
    pen.beginPath();
    pen.moveTo(foot.x, foot.y);
    pen.lineTo(top.x, top.y);
    pen.stroke();
    for (const share of [0, 0.5, 1]) {
      const p = project(x, y, share, size);
      pen.fillText(Number(lossAt(share).toPrecision(2)).toString(), p.x - 6, p.y);
      pen.beginPath();
      pen.moveTo(p.x - 3, p.y);
      pen.lineTo(p.x, p.y);
      pen.stroke();
    }
    pen.textAlign = "center";
    const sides = { x: [[0, -1.22], [0, 1.22]], y: [[-1.22, 0], [1.22, 0]] };
    for (const [name, places] of Object.entries(sides)) {
      const [near] = places.map(([px, py]) => project(px, py, 0, size)).sort((a, b) => a.depth - b.depth);
      pen.fillText(name, near.x, near.y);
    }
  }

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      surfaces.forEach(draw);
    });
  }

  function turn(yaw, pitch) {
    view.yaw += yaw;
    view.pitch = Math.min(1.5, Math.max(0.05, view.pitch + pitch));
    redraw();
  }

  for (const { canvas } of surfaces) {
    let last = null;
    canvas.addEventListener("pointerdown", (event) => {
      last = event;
      try { canvas.setPointerCapture(event.pointerId); } catch { /* a made-up pointer cannot be held */ }
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!last) return;
      turn((event.clientX - last.clientX) * 0.01, (event.clientY - last.clientY) * 0.008);
      last = event;
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (last = null));
    canvas.addEventListener("dblclick", () => { Object.assign(view, start); redraw(); });
    canvas.addEventListener("keydown", (event) => {
      const keys = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.08], ArrowDown: [0, -0.08] };
      if (!keys[event.key]) return;
      event.preventDefault();
      turn(...keys[event.key]);
    });
  }
  document.querySelectorAll("input.logarithmic").forEach((other) =>
    other.addEventListener("change", () => {
      document.querySelectorAll("input.logarithmic").forEach((each) => (each.checked = other.checked));
      redraw();
    }));
  window.addEventListener("resize", redraw);
  document.addEventListener("toggle", redraw, true); // a surface in a folded part has no size until it is opened
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  redraw();
})();
