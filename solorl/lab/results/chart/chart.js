"use strict";
// Curves by uPlot, of reports and of the site: methods, single seeds, the metric and the axis can be switched.
const DASHES = [[], [6, 4], [2, 3], [7, 3, 2, 3]];
const METRICS = {eval: "evaluation", train: "training"};
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = m => css(`--m${m % 7}`);
const number = v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : v.toFixed(Math.abs(v) >= 10 ? 1 : 2);
const steps = x => x >= 1e6 ? `${+(x / 1e6).toPrecision(4)}M` : x >= 1e3 ? `${+(x / 1e3).toPrecision(4)}k` : `${+x.toPrecision(4)}`;
const unit = longest => longest < 180 ? [1, "s"] : longest < 10800 ? [60, "min"] : [3600, "h"];
const nearest = (xs, x) => xs.reduce((best, value, i) => Math.abs(value - x) < Math.abs(xs[best] - x) ? i : best, 0);

function make(tag, attributes, parent, text = "") {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.append(text);
  if (parent) parent.append(node);
  return node;
}

function start(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const state = {...data.start, seeds: false, hidden: new Set(), plots: []};
  const box = figure.querySelector(".chart-box");
  const controls = make("div", {class: "controls", role: "group", "aria-label": "What the chart shows"}, box);
  const panels = make("div", {class: "panels"}, box);
  box.hidden = false;
  const toggle = (label, pressed, change, kind = "") => {
    const button = make("button", {type: "button", "aria-pressed": pressed, class: kind}, controls, label);
    button.onclick = () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", now);
      change(now);
      draw();
    };
    return button;
  };
  data.methods.forEach((method, m) => {
    const button = toggle(method, true, now => now ? state.hidden.delete(m) : state.hidden.add(m), "method");
    const dashed = DASHES[Math.floor(m / 7) % 4].length ? "dashed" : "solid";
    button.prepend(make("span", {class: "key", style: `border-color: var(--m${m % 7}); border-top-style: ${dashed}`}));
  });
  toggle("single seeds", false, now => { state.seeds = now; });
  const keys = new Set(data.panels.flatMap(panel => Object.keys(panel.lines)));
  if (keys.has(`${state.metric} time`)) {
    toggle("by time of training", state.axis === "time", now => { state.axis = now ? "time" : "steps"; });
  }
  const other = state.metric === "eval" ? "train" : "eval";
  if (keys.has(`${other} ${state.axis}`)) {
    toggle(METRICS[other], false, now => { state.metric = now ? other : data.start.metric; });
  }

  // {title, lines: {"eval steps": [{m, band, x, y, lo, hi, seeds}], ...}}; of a profile {"score": [...]}
  function panel([item, place]) {
    const axis = item.lines.score ? "score" : state.axis;
    const lines = (item.lines.score || item.lines[`${state.metric} ${axis}`] || []).filter(line => !state.hidden.has(line.m));
    make("h3", {}, place, item.title);
    const ends = lines.map(line => `${data.methods[line.m]} ends at ${number(line.y.at(-1))}`).join(", ");
    const canvas = make("div", {role: "img", tabindex: 0, "aria-label": `${item.title}: ${ends || "nothing is shown"}`}, place);
    const values = make("div", {class: "values", "aria-live": "polite"}, place);
    if (!lines.length) return;
    const longest = Math.max(...lines.map(line => line.x.at(-1)));
    const [size, name] = axis === "time" ? unit(longest) : [1, ""];
    const tables = [], series = [{}], bands = [], singles = [];
    const add = (x, y, options) => {
      tables.push([x.map(each => each / size), y]);
      series.push({points: {show: x.length === 1}, spanGaps: true, ...options});
      return series.length - 1;
    };
    for (const line of lines) {
      const stroke = colour(line.m), dash = DASHES[Math.floor(line.m / 7) % 4];
      if (line.band) {
        const high = add(line.x, line.hi, {width: 0}), low = add(line.x, line.lo, {width: 0});
        bands.push({series: [high, low], fill: `${stroke}2e`});
      }
      if (state.seeds) for (const [seed, y] of Object.entries(line.seeds)) {
        singles.push([add(line.x, y, {stroke: `${stroke}77`, width: 1}), `${data.methods[line.m]}, seed ${seed}:`]);
      }
      add(line.x, line.y, {stroke, width: 2, dash});
    }
    const below = x => axis === "time" ? `${+x.toPrecision(3)} ${name}` : axis === "score" ? `${+x.toPrecision(3)}` : steps(x);
    const said = (plot, at) => {  // the values at a position, and the single seed next to the pointer
      const x = plot.data[0][at], found = [below(x)];
      for (const line of lines) {
        const i = nearest(line.x, x * size), ends = `${number(line.lo[i])} to ${number(line.hi[i])}`;
        const band = {interval: ` [${ends.replace(" to ", ", ")}]`, range: ` (${ends})`}[line.band] || "";
        if (Math.abs(line.x[i] - x * size) <= longest / 30) found.push(`${data.methods[line.m]} ${number(line.y[i])}${band}`);
      }
      const near = singles.filter(([k]) => plot.data[k][at] != null).map(([k, words]) => {
        return [Math.abs(plot.valToPos(plot.data[k][at], "y") - plot.cursor.top), `${words} ${number(plot.data[k][at])}`];
      }).sort((a, b) => a[0] - b[0])[0];
      return [...found, ...near ? [`nearest: ${near[1]}`] : []].join("  ·  ");
    };
    const grid = {stroke: css("--line"), width: 1}, font = "12px system-ui, sans-serif";
    const look = {stroke: css("--soft"), grid, ticks: {show: false}, font, labelFont: font, labelSize: 16};
    const label = {steps: "steps", time: "time of training", score: "normalised score s"}[axis];
    const plot = new uPlot({
      width: Math.max(220, place.clientWidth), height: 246, legend: {show: false}, bands, series,
      cursor: {drag: {x: false, y: false}, points: {show: false}, y: false},
      scales: {
        x: {time: false, range: (_, low, high) => [Math.min(0, low), high || 1]},
        ...axis === "score" ? {y: {range: [-0.02, 1.02]}} : {},
      },
      axes: [
        {...look, label, values: (_, marks) => marks.map(below), space: 58, size: 28},
        {...look, size: 56, values: (_, marks) => marks.map(v => v.toLocaleString("en"))},
      ],
      hooks: {setCursor: [plot => { values.textContent = plot.cursor.idx == null ? "" : said(plot, plot.cursor.idx); }]},
    }, uPlot.join(tables), canvas);
    canvas.onkeydown = event => {
      const step = {ArrowLeft: -1, ArrowRight: 1}[event.key], last = plot.data[0].length - 1;
      if (!step) return;
      event.preventDefault();
      const at = Math.max(0, Math.min(last, (plot.cursor.idx ?? -1) + step));
      plot.setCursor({left: plot.valToPos(plot.data[0][at], "x"), top: 0});
    };
    canvas.onclick = () => {
      const detail = [item.title, plot.data[0][plot.cursor.idx ?? 0]];
      if (axis === "steps") figure.dispatchEvent(new CustomEvent("pick", {detail}));
    };
    state.plots.push(plot);
  }
  function draw() {
    state.plots.forEach(plot => plot.destroy());
    state.plots = [];
    panels.replaceChildren();
    data.panels.map(item => [item, make("div", {}, panels)]).forEach(panel);
  }
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let waiting;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
  figure.show = panels => { data.panels = panels; draw(); };
}
document.querySelectorAll("figure.chart").forEach(start);
