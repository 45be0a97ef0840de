"use strict";
// Finds the sections that have all words of the query, at the beginning of a word; titles and headings count more.
const field = document.querySelector("[role=search] input"), list = document.getElementById("found");
const tell = text => { document.getElementById("count").textContent = text; };

function score([, title, heading, , words], query) {
  let sum = 0;
  for (const word of query) {
    const inside = ` ${words}`.includes(` ${word}`) || words.includes(`_${word}`);
    const above = title.toLowerCase().includes(word), named = heading.toLowerCase().includes(word);
    if (!inside && !above && !named) return 0;
    sum += inside + 4 * named + 6 * above + 20 * (title.toLowerCase() === word);
  }
  return sum + !heading;
}

function find() {
  const query = field.value.toLowerCase().split(/[^\p{L}\p{N}_-]+/u).filter(Boolean);
  const found = query.length ? INDEX.map(entry => [score(entry, query), entry]).filter(([points]) => points) : [];
  found.sort((a, b) => b[0] - a[0]);
  tell(query.length ? `${found.length} section${found.length === 1 ? "" : "s"}${found.length > 40 ? ", the first 40 shown" : ""}` : "Type words into the field at the top.");
  list.replaceChildren(...found.slice(0, 40).map(([, [url, title, heading, text]]) => {
    const item = document.createElement("li"), link = document.createElement("a"), start = document.createElement("p");
    link.href = url;
    link.textContent = heading && heading !== title ? `${title}: ${heading}` : title;
    start.className = "note";
    start.textContent = `${text} …`;
    item.append(link, start);
    return item;
  }));
}

field.value = new URLSearchParams(location.search).get("q") || "";
field.form.addEventListener("submit", event => {
  event.preventDefault();
  history.replaceState(null, "", `?q=${encodeURIComponent(field.value)}`);
  find();
});
field.addEventListener("input", find);
field.focus();
find();
