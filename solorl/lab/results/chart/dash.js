// The page of `solo dash` asks every few seconds for itself and takes over what is new; a click on a curve shows a film.
const figure = document.querySelector("figure"), list = document.getElementById("films"), video = document.getElementById("film");
const data = page => page.querySelector("figure script").textContent;
const numbers = /"(x|y|lo|hi|seeds)":(\[[^\]]*\]|\{[^}]*\})/g;
let last;

async function play() {
  list.parentNode.hidden = !list.value;
  if (!list.value || video.title === list.value) return;
  video.title = list.value;
  URL.revokeObjectURL(video.src);
  video.src = URL.createObjectURL(await (await fetch(list.value)).blob());
}

function update(page) {
  const [old, now] = [data(document), data(page)], chosen = list.value;
  if (old.replace(numbers, "") !== now.replace(numbers, "")) return location.reload();  // another method, panel or band
  for (const id of ["live", "groups", "notes"]) document.getElementById(id).replaceWith(page.getElementById(id));
  list.replaceChildren(...page.getElementById("films").children);
  if (chosen) list.value = chosen;
  play();
  figure.querySelector("script").textContent = now;
  if (old !== now) figure.show(JSON.parse(now).panels);
}

async function poll() {
  try {
    const text = await (await fetch(location)).text();
    if (last && text !== last) update(new DOMParser().parseFromString(text, "text/html"));
    last = text;
  } catch {
    document.getElementById("live").textContent = last = "solo dash has ended.";
  }
  setTimeout(poll, document.hidden ? 30000 : 5000);
}

figure.append(list.parentNode);
list.onchange = play;
figure.addEventListener("pick", ({detail: [env, step]}) => {
  const films = [...list.options].filter(film => film.dataset.env === env);
  if (films.length) list.value = films[nearest(films.map(film => +film.dataset.step), step)].value;
  play();
});
list.selectedIndex = list.length - 1;
play();
poll();
