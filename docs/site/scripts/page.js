"use strict";
// Blocks of code get a button that copies them, and what can be scrolled sideways says so.
async function copied(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {  // no clipboard, as on pages from the disk in some browsers
    getSelection().selectAllChildren(code);
    return document.execCommand("copy");
  }
}

for (const code of document.querySelectorAll("pre > code")) {
  const block = code.parentElement, box = document.createElement("div"), button = document.createElement("button");
  box.className = "code";
  button.className = "copy";
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-live", "polite");
  button.addEventListener("click", async () => {
    button.textContent = await copied(code) ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  block.replaceWith(box);
  box.append(block, button);
}

const wide = new ResizeObserver(entries => entries.forEach(({target}) =>
  target.classList.toggle("wide", target.scrollWidth > target.clientWidth + 1)));
document.querySelectorAll(".scroll").forEach(each => wide.observe(each));
