"use strict";
// Two sources side by side: lines by Myers' algorithm, words of lines that are alike marked, equal stretches folded.
const SOURCES = {}, CONTEXT = 3, ALIKE = 0.5;
const form = document.getElementById("choice"), place = document.getElementById("diff");
const plain = html => { const box = document.createElement("template"); box.innerHTML = html; return box.content.textContent; };
const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
const cut = line => line.match(/\w+|\s+|[^\w\s]/g) || [];

function load(name) {
  if (SOURCES[name]) return Promise.resolve(SOURCES[name]);
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `sources/${name}.js`;
    script.onload = () => resolve(SOURCES[name]);
    script.onerror = reject;
    document.head.append(script);
  });
}

// The pairs of equal items of two lists, in order: the shortest edit script of E. Myers 1986.
function equals(a, b) {
  const paths = [], furthest = new Map([[1, 0]]);
  let done = false;
  for (let d = 0; !done; d++) {
    paths.push(new Map(furthest));
    for (let k = -d; k <= d && !done; k += 2) {
      let x = k === -d || (k !== d && furthest.get(k - 1) < furthest.get(k + 1)) ? furthest.get(k + 1) : furthest.get(k - 1) + 1;
      let y = x - k;
      while (x < a.length && y < b.length && a[x] === b[y]) { x++; y++; }
      furthest.set(k, x);
      done = x >= a.length && y >= b.length;
    }
  }
  const pairs = [];
  let x = a.length, y = b.length;
  for (let d = paths.length - 1; d >= 0; d--) {
    const before = paths[d], k = x - y;
    const last = k === -d || (k !== d && before.get(k - 1) < before.get(k + 1)) ? k + 1 : k - 1;
    const fromX = d ? before.get(last) : 0, fromY = d ? fromX - last : 0;
    while (x > fromX && y > fromY) pairs.push([--x, --y]);
    [x, y] = [fromX, fromY];
  }
  return pairs.reverse();
}

function likeness(a, b) {
  const counts = new Map();
  let common = 0;
  for (const word of a) counts.set(word, (counts.get(word) || 0) + 1);
  for (const word of b) if (counts.get(word) > 0) { common++; counts.set(word, counts.get(word) - 1); }
  return 2 * common / Math.max(1, a.length + b.length);
}

function marked(line, kept, tag) {
  return line.map((word, i) => kept.has(i) ? escaped(word) : `<${tag}>${escaped(word)}</${tag}>`).join("").replaceAll(`</${tag}><${tag}>`, "");
}

// Rows of the lines i to i2 and j to j2, none of them equal: those that are alike stand side by side.
function* changed(a, b, i, i2, j, j2) {
  for (; i < i2 || j < j2;) {
    const ours = i < i2 && cut(a.text[i]), theirs = j < j2 && cut(b.text[j]);
    const both = ours && theirs && likeness(ours.filter(w => w.trim()), theirs.filter(w => w.trim())) >= ALIKE;
    if (both) {
      const pairs = equals(ours, theirs);
      yield [i, j, marked(ours, new Set(pairs.map(p => p[0])), "del"), marked(theirs, new Set(pairs.map(p => p[1])), "ins")];
    } else {
      yield [ours ? i : null, theirs ? j : null, ours ? a.html[i] : "", theirs ? b.html[j] : ""];
    }
    i += Boolean(ours);
    j += Boolean(theirs);
  }
}

function cells([i, j, left, right], same) {
  const side = (number, kind, html) => {
    const name = number === null ? "none" : kind;
    return `<b class="${name}">${number === null ? "" : number + 1}</b><span class="${name}">${html}</span>`;
  };
  return `<div class="row">${side(i, same ? "" : "minus", left)}${side(j, same ? "twin" : "plus", right)}</div>`;
}

async function compare() {
  const names = [form.a.value, form.b.value];
  const [a, b] = (await Promise.all(names.map(load))).map(html => ({html, text: html.map(plain)}));
  const pairs = [...equals(a.text, b.text), [a.text.length, b.text.length]];
  const rows = [];
  let i = 0, j = 0, added = 0, removed = 0;
  for (const [x, y] of pairs) {
    for (const row of changed(a, b, i, x, j, y)) rows.push([row, false]);
    [removed, added] = [removed + x - i, added + y - j];
    if (x < a.text.length) rows.push([[x, y, a.html[x], b.html[y]], true]);
    [i, j] = [x + 1, y + 1];
  }
  const near = new Set(rows.flatMap(([, same], n) => same ? [] : Array.from({length: 2 * CONTEXT + 1}, (_, k) => n + k - CONTEXT)));
  let text = "", folded = [];
  const close = () => {
    if (folded.length) text += `<details><summary>${folded.length} equal line${folded.length > 1 ? "s" : ""}</summary>${folded.join("")}</details>`;
    folded = [];
  };
  rows.forEach(([row, same], n) => {
    if (near.has(n)) { close(); text += cells(row, same); } else folded.push(cells(row, same));
  });
  close();
  place.innerHTML = text;
  document.getElementById("counts").textContent = `${names[0]} → ${names[1]}: ${added} lines added, ${removed} removed`;
  history.replaceState(null, "", `?a=${names[0]}&b=${names[1]}`);
}

const asked = new URLSearchParams(location.search);
for (const side of ["a", "b"]) if ([...form[side].options].some(option => option.value === asked.get(side))) form[side].value = asked.get(side);
form.addEventListener("change", compare);
document.getElementById("swap").onclick = () => { [form.a.value, form.b.value] = [form.b.value, form.a.value]; compare(); };
compare();
