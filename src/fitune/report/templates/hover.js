// The line for it says what is under the pointer, or what the arrow keys came to: a bar has its words in data-tip, a
// picture the points of its curves in data-curves. All of it is text.
function say(of, words) {
  of.closest("figure, section").querySelector(".tip").textContent = words;
}

function tip(event) {
  const of = event.target.closest?.("[data-tip]");
  if (of) say(of, of.dataset.tip);
}

function nearest(points, step) {
  return points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
}

function drawn(svg, name, settings) {
  const one = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(settings)) one.setAttribute(key, value);
  return one;
}

// Of each curve the point nearest to a step: a mark on it and its value. A curve without that very step says which.
function showStep(svg, { at, scale, top, bottom, curves }, wanted, isMarked = true) {
  const found = curves.map(([name, points]) => [name, nearest(points, wanted)]);
  const step = nearest(found.map(([, point]) => point), wanted)[0], count = (one) => one.toLocaleString("en");
  const values = found.map(([name, [own, , words]]) => `${name} ${words}` + (own === step ? "" : ` (step ${count(own)})`));
  say(svg, `Step ${count(step)}: ${values.join(", ")}`);
  svg.querySelector(".mark")?.remove();
  if (!isMarked) return step;
  const mark = svg.appendChild(drawn(svg, "g", { class: "mark" })), x = at + scale * step;
  mark.append(drawn(svg, "line", { x1: x, x2: x, y1: top, y2: bottom }));
  for (const [, [own, y]] of found) mark.append(drawn(svg, "circle", { cx: at + scale * own, cy: y, r: 3 }));
  return step;
}

function showBar(svg, bar) {
  svg.querySelector(".at")?.classList.remove("at");
  bar.classList.add("at");
  say(svg, bar.dataset.tip);
  return bar;
}

for (const svg of document.querySelectorAll("figure svg[tabindex]")) {
  const line = svg.closest("figure").querySelector("figcaption").appendChild(document.createElement("span"));
  Object.assign(line, { className: "tip", role: "status", textContent: "Point at a bar, or use the arrow keys." });
  const data = svg.dataset.curves && JSON.parse(svg.dataset.curves);
  const stops = data ? [...new Set(data.curves.flatMap(([, points]) => points.map(([step]) => step)))].sort((a, b) => a - b)
    : [...svg.querySelectorAll("[data-tip]")];
  const show = (stop) => data ? showStep(svg, data, stop) : showBar(svg, stop);
  let at;
  const rest = () => {
    at = undefined;
    if (data) showStep(svg, data, stops.at(-1), false);
  };
  svg.addEventListener("keydown", (event) => {
    const place = at === undefined ? (data ? stops.length - 1 : -1) : stops.indexOf(at);
    const to = { ArrowLeft: place - 1, ArrowUp: place - 1, ArrowRight: place + 1, ArrowDown: place + 1, Home: 0, End: stops.length }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    at = show(stops[Math.max(0, Math.min(to, stops.length - 1))]);
  });
  svg.addEventListener("blur", rest);
  rest();
  if (!data) continue;
  for (const name of ["pointerdown", "pointermove"]) svg.addEventListener(name, (event) => {
    const box = svg.getBoundingClientRect();
    at = show(((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width - data.at) / data.scale);
  });
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") rest(); });
}
document.addEventListener("pointerover", tip);
document.addEventListener("focusin", tip);
