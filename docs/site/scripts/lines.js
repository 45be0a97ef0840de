"use strict";
// Lights all lines of the definition that a link leads to, not only the first one.
function light() {
  document.querySelectorAll(".listing .lit").forEach(line => line.classList.remove("lit"));
  const first = /^#L\d+$/.test(location.hash) && document.getElementById(location.hash.slice(1));
  for (let line = first, number = first && +first.id.slice(1); line && number <= +(first.dataset.end || 0); number++) {
    line.classList.add("lit");
    line = line.nextElementSibling;
  }
}
addEventListener("hashchange", light);
light();
