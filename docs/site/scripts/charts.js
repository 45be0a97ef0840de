"use strict";
// Learning curves by uPlot: methods, single seeds and the axis can be switched.
const DASHES = [[], [6, 4], [2, 3], [7, 3, 2, 3]];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = m => css(`--m${m % 7}`);
const number = v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : v.toFixed(Math.abs(v) >= 10 ? 1 : 2);
const steps = x => x >= 1e6 ? `${+(x / 1e6).toPrecision(4)}M` : x >= 1e3 ? `${+(x / 1e3).toPrecision(4)}k` : `${+x.toPrecision(4)}`;
const unit = longest => longest < 180 ? [1, "s"] : longest < 10800 ? [60, "min"] : [3600, "h"];

function make(tag, attributes, parent, text = "") {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.append(text);
  if (parent) parent.append(node);
  return node;
}

function start(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const state = {axis: "steps", seeds: false, hidden: new Set(), plots: []};
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
    button.prepend(make("span", {class: "key", style: `border-color: var(--m${m % 7})`}));
  });
  toggle("single seeds", false, now => { state.seeds = now; });
  if (data.panels.some(panel => panel.time.length)) {
    toggle("by time of training", false, now => { state.axis = now ? "time" : "steps"; });
  }

  function panel([item, place]) {
    const lines = item[state.axis].filter(line => !state.hidden.has(line.m));
    make("h3", {}, place, item.title);
    const ends = lines.map(line => `${data.methods[line.m]} ends at ${number(line.y.at(-1))}`).join(", ");
    const canvas = make("div", {role: "img", "aria-label": `${item.title}: ${ends || "nothing is shown"}`}, place);
    const values = make("div", {class: "values"}, place);
    if (!lines.length) return;
    const longest = Math.max(...lines.map(line => line.x.at(-1)));
    const [size, name] = state.axis === "time" ? unit(longest) : [1, ""];
    const tables = [], series = [{}], bands = [], means = [];
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
      if (state.seeds) for (const y of Object.values(line.seeds)) add(line.x, y, {stroke: `${stroke}77`, width: 1});
      means.push([add(line.x, line.y, {stroke, width: 2, dash}), line]);
    }
    const soft = css("--soft"), grid = {stroke: css("--line"), width: 1}, ticks = {show: false}, font = "12px system-ui, sans-serif";
    const below = (plot, marks) => marks.map(x => state.axis === "steps" ? steps(x) : `${+x.toPrecision(3)} ${name}`);
    const axis = {stroke: soft, grid, ticks, font};
    const plot = new uPlot({
      width: Math.max(220, place.clientWidth), height: 230, legend: {show: false}, bands, series,
      cursor: {drag: {x: false, y: false}, points: {show: false}, y: false},
      scales: {x: {time: false, range: (_, low, high) => [Math.min(0, low), high || 1]}},
      axes: [{...axis, values: below, space: 58, size: 28}, {...axis, size: 56, values: (_, marks) => marks.map(v => v.toLocaleString("en"))}],
      hooks: {setCursor: [plot => {
        const i = plot.cursor.idx;
        values.textContent = i == null ? "" : [below(plot, [plot.data[0][i]])[0], ...means.map(([k, line]) => {
          const y = plot.data[k][i];
          return y == null ? null : `${data.methods[line.m]} ${number(y)}`;
        }).filter(Boolean)].join("  ·  ");
      }]},
    }, uPlot.join(tables), canvas);
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
}
document.querySelectorAll("figure.chart").forEach(start);
